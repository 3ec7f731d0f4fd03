"""A matrix on disk: what is saved is what is read, and what is not one of this target's is refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eval.matrix import WIDTH, SuccessorMatrix
from eval.matrix_file import FORMAT, read_matrix, save_matrix, starting_matrix
from recipes.schema import UserError

CPU = torch.device("cpu")


def learnt() -> SuccessorMatrix:
    matrix = SuccessorMatrix(50)
    matrix.update(torch.tensor([3, 49, 0]), torch.arange(3 * WIDTH).view(3, WIDTH))
    return matrix


def test_a_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    for matrix in (learnt(), SuccessorMatrix(50)):
        save_matrix(matrix, path, "f00d")
        assert torch.equal(read_matrix(path, "f00d").rows, matrix.rows)
        assert torch.equal(starting_matrix(str(path), 50, CPU, "f00d").rows, matrix.rows)
    assert starting_matrix("warm-5", 50, CPU, "f00d").filled == 0
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]


def test_only_filled_rows_take_room(tmp_path: Path) -> None:
    matrix = SuccessorMatrix(100_000)
    matrix.update(torch.tensor([3]), torch.arange(WIDTH).view(1, WIDTH))
    save_matrix(matrix, tmp_path / "m.safetensors", "f00d")
    assert (tmp_path / "m.safetensors").stat().st_size < 1000


def test_what_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    with pytest.raises(UserError, match="no such file"):
        read_matrix(path, "f00d")
    save_matrix(learnt(), path, "f00d")
    with pytest.raises(UserError, match="another target"):
        read_matrix(path, "feed")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match="is damaged"):
        read_matrix(path, "f00d")
    tokens, successors = torch.tensor([3]), torch.zeros(1, WIDTH, dtype=torch.int32)
    about = {"format": FORMAT, "target": "f00d", "vocab_size": "50"}
    save_file({"tokens": tokens}, path)
    with pytest.raises(UserError, match="holds no successor matrix"):
        read_matrix(path, "f00d")
    for damaged in (
        {"tokens": tokens},
        {"tokens": tokens, "successors": successors[:, :3].clone()},
        {"tokens": tokens + 47, "successors": successors},
        {"tokens": tokens, "successors": successors - 1},
        {"tokens": tokens, "successors": successors.bool()},
        {"tokens": tokens.view(1, 1), "successors": successors},
    ):
        save_file(damaged, path, about)
        with pytest.raises(UserError, match="is damaged"):
            read_matrix(path, "f00d")
    save_file({"tokens": tokens, "successors": successors}, path, about)
    assert read_matrix(path, "f00d", 50).filled == 1
    with pytest.raises(UserError, match="of a vocabulary of 50 tokens, the target's has 60"):
        read_matrix(path, "f00d", 60)
    save_file({"tokens": tokens, "successors": successors}, path, about | {"vocab_size": "9" * 15})
    with pytest.raises(UserError, match="is damaged"):
        read_matrix(path, "f00d")
