"""Token rows on disk and the vocabulary made from them."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from data_prep.rows import Rows, make_rows, write_rows
from data_prep.supervision import supervised
from data_prep.vocabulary import build_vocab, coverage, predicted
from recipes.schema import UserError

ROWS = [([9, 8, 7, 7, 6, 1], [0, 0, 1, 1, 1, 1]), ([9, 5], [0, 1]), ([9, 7, 1, 9, 4, 4, 1], [0, 1, 1, 0, 2, 2, 2])]
META = [{"source": s, "id": str(i)} for i, s in enumerate("aab")]


def test_round_trip(tmp_path: Path) -> None:
    write_rows(make_rows(ROWS, META), tmp_path / "rows")
    rows = Rows.load(tmp_path / "rows")
    assert len(rows) == 3 and rows.lengths.tolist() == [6, 2, 7] and rows.meta == META
    for i, (ids, answer) in enumerate(ROWS):
        got = rows.row(i)
        assert (got[0].tolist(), got[1].tolist()) == (ids, answer)
        assert (got[0].dtype, got[1].dtype) == (torch.int64, torch.int32)
    assert rows.subset([2, 0]).row(0)[0].tolist() == ROWS[2][0]
    assert len(rows.subset([])) == 0 and len(rows.subset([]).ids) == 0


def test_damaged_rows_are_refused(tmp_path: Path) -> None:
    write_rows(make_rows(ROWS, META), tmp_path / "rows")
    file = tmp_path / "rows" / "rows.safetensors"
    whole = load_file(file)
    damages = {
        "offsets do not divide": {**whole, "offsets": torch.tensor([0, 7, 6, 15])},
        "answer marks": {**whole, "answer": whole["answer"][:-1].clone()},
        "holds": {"ids": whole["ids"]},
        "ids is": {**whole, "ids": whole["ids"].long()},
        "lines in meta": {**whole, "offsets": torch.tensor([0, 15])},
        "negative": {**whole, "ids": -whole["ids"]},
    }
    for complaint, tensors in damages.items():
        save_file(tensors, file)
        with pytest.raises(UserError, match=complaint):
            Rows.load(tmp_path / "rows")
    file.write_bytes(b"no tensors")
    with pytest.raises(UserError, match="Delete the folder"):
        Rows.load(tmp_path / "rows")


def test_predicted_tokens_are_those_of_supervised_slots() -> None:
    rows = make_rows(ROWS, META)
    mask = predicted(rows)
    for i in range(len(rows)):
        _, answer = rows.row(i)
        slots = supervised(answer, 1)[0].nonzero().flatten()
        inside = mask[int(rows.offsets[i]) : int(rows.offsets[i + 1])]
        assert inside.nonzero().flatten().tolist() == (slots + 2).tolist()


def test_vocabulary_is_the_most_frequent_with_ties_by_id_and_ends() -> None:
    rows = make_rows(ROWS, META)
    assert Counter(rows.ids[predicted(rows)].tolist()) == {1: 3, 7: 1, 6: 1, 4: 1}
    assert build_vocab(rows, 3, 12, [1]).kept_ids.tolist() == [1, 4, 6]
    assert build_vocab(rows, 3, 12, [1, 11]).kept_ids.tolist() == [1, 4, 11]
    assert build_vocab(rows, 6, 12, [1]).kept_ids.tolist() == [0, 1, 2, 4, 6, 7]
    assert build_vocab(rows, 0, 12, [1]).full and build_vocab(rows, 12, 12, [1]).full


def test_coverage_by_source() -> None:
    rows = make_rows(ROWS, META)
    covered = coverage(rows, build_vocab(rows, 2, 12, [1]))
    assert covered == {"tokens": 6, "overall": 4 / 6, "by_source": {"a": 1 / 3, "b": 1.0}}
