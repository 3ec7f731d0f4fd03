"""A successor matrix on disk: the rows that are filled, and the target whose words they are."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from eval.matrix import WIDTH, SuccessorMatrix
from recipes.files import make_folder, user_path, write_bytes
from recipes.schema import UserError

FORMAT = "espalier successor matrix 1"
LARGEST = 1 << 24  # tokens of a vocabulary that is believed


def is_file(state: str) -> bool:
    """Whether eval.matrix names a file, and not a way to start."""
    return state.endswith(".safetensors")


def save_matrix(matrix: SuccessorMatrix, path: Path, fingerprint: str) -> None:
    """`tokens` [n] and `successors` [n, 8], int32; the target's fingerprint and vocabulary size beside them."""
    rows = matrix.rows[:-1].cpu()
    tokens = (rows[:, 0] >= 0).nonzero().squeeze(1)
    tensors = {"tokens": tokens.int(), "successors": rows[tokens].int()}
    about = {"format": FORMAT, "target": fingerprint, "vocab_size": str(len(rows))}
    write_bytes(make_folder(path.parent) / path.name, save(tensors, about))


def read_matrix(path: Path, fingerprint: str = "", vocab_size: int = 0) -> SuccessorMatrix:
    """Raises UserError for what is missing, damaged, or with a fingerprint and vocabulary size given another
    target's."""
    if not path.is_file():
        raise UserError(f"eval.matrix={path}: no such file. eval.calibrate writes one, or use cold, carried or warm-N")
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            if about.get("format") != FORMAT:
                raise UserError(f"eval.matrix={path} holds no successor matrix. eval.calibrate writes one")
            size, stated = int(about["vocab_size"]), about["target"]
            tokens, successors = _integers(file.get_tensor("tokens")), _integers(file.get_tensor("successors"))
        _check(tokens, successors, size)
        if stated == fingerprint and vocab_size and size != vocab_size:
            raise ValueError(f"of a vocabulary of {size} tokens, the target's has {vocab_size}")
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise UserError(f"eval.matrix={path} is damaged ({error}). Write it again with eval.calibrate") from error
    if fingerprint and stated != fingerprint:
        raise UserError(
            f"eval.matrix={path} was learnt from another target (fingerprint {stated}, this one's is {fingerprint}). "
            "Write one for this target with eval.calibrate, or use cold, carried or warm-N"
        )
    matrix = SuccessorMatrix(size)
    matrix.rows[tokens] = successors
    return matrix


def _integers(tensor: Tensor) -> Tensor:
    if tensor.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{tensor.dtype} where int32 is written")
    return tensor.long()


def _check(tokens: Tensor, successors: Tensor, size: int) -> None:
    if not 0 < size <= LARGEST or tokens.dim() != 1:
        raise ValueError(f"{tokens.dim()} dimensions of tokens, of a vocabulary of {size}")
    if successors.shape != (len(tokens), WIDTH):
        raise ValueError(f"{tuple(successors.shape)} successors of {len(tokens)} tokens")
    for ids in (tokens, successors):
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < size:
            raise ValueError(f"token ids outside of 0..{size - 1}")


def starting_matrix(state: str, vocab_size: int, device: torch.device, fingerprint: str) -> SuccessorMatrix:
    """Empty, or what the file of that name holds."""
    matrix = SuccessorMatrix(vocab_size, device)
    if is_file(state):
        matrix.assign(read_matrix(user_path(state), fingerprint, vocab_size))
    return matrix
