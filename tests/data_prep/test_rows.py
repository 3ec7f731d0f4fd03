"""Token rows on disk and the vocabulary made from them."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from data_prep.rows import Rows, make_rows, split_by_prompt, write_rows
from data_prep.supervision import supervised
from data_prep.vocabulary import build_vocab, coverage, low_coverage, predicted, special_tokens
from models.vocab import VocabMap, read_vocab, write_vocab
from recipes.schema import UserError

ROWS = [([9, 8, 7, 7, 6, 1], [0, 0, 1, 1, 1, 1]), ([9, 5], [0, 1]), ([9, 7, 1, 9, 4, 4, 1], [0, 1, 1, 0, 2, 2, 2])]
META = [{"source": s, "category": c, "id": str(i)} for i, (s, c) in enumerate(zip("aab", "xyy", strict=True))]


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
        "into rows": {**whole, "offsets": torch.tensor([0, 6, 6, 15])},
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


@given(st.lists(st.lists(st.sampled_from([0, 0, 1, 1, 1, 2]), min_size=1, max_size=9), min_size=1, max_size=5))
def test_predicted_tokens_are_those_of_supervised_slots(marks: list[list[int]]) -> None:
    """Whatever the rows look like: answers from the first token on, of one token, next to each other."""
    rows = make_rows([([7] * len(row), row) for row in marks], [{}] * len(marks))
    mask = predicted(rows)
    for i in range(len(rows)):
        _, answer = rows.row(i)
        slots = supervised(answer, 1)[0].nonzero().flatten()
        inside = mask[int(rows.offsets[i]) : int(rows.offsets[i + 1])]
        assert inside.nonzero().flatten().tolist() == (slots + 2).tolist()


@given(
    keys=st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=20),
    held_out=st.integers(0, 12),
    more=st.text("ijk"),
)
def test_held_out_rows_are_whole_prompts(keys: list[str], held_out: int, more: str) -> None:
    def split(keys: str | list[str]) -> tuple[list[int], list[int]]:
        rows = make_rows([([1], [0])] * len(keys), [{"key": key} for key in keys])
        return split_by_prompt(rows, range(len(rows)), held_out)

    train, held = split(keys)
    assert sorted(train + held) == list(range(len(keys)))
    aside = {keys[i] for i in held}
    assert aside.isdisjoint(keys[i] for i in train)
    assert len(held) >= min(held_out, len(keys))
    assert not held or len(held) - keys.count(max(aside)) < held_out, "no prompt more than was asked for"
    _, later = split([*keys, *more])  # keys that sort behind: nobody changes sides
    assert {[*keys, *more][i] for i in later} >= aside


def test_vocabulary_holds_special_tokens_however_rare(tmp_path: Path) -> None:
    tokenizer = SimpleNamespace(all_special_ids=[11, 3, 12])
    assert special_tokens(tokenizer, {1}, vocab_size=12) == [1, 3, 11], "12 has no row in the target"
    vocab = build_vocab(make_rows(ROWS, META), 4, 12, [1, 3, 11])
    assert vocab.kept_ids.tolist() == [1, 3, 4, 11]
    with pytest.raises(UserError, match=r"eagle.draft_vocab=2 has no room for the 3 special tokens"):
        build_vocab(make_rows(ROWS, META), 2, 12, [1, 3, 11])


def test_a_vocabulary_file_is_whole_or_refused(tmp_path: Path) -> None:
    vocab, path = VocabMap.from_ids([1, 3, 11], 12), tmp_path / "vocab.safetensors"
    write_vocab(vocab, path)
    assert read_vocab(path).hash() == vocab.hash()
    whole = load_file(path)
    for damaged in ({"d2t": whole["d2t"]}, {**whole, "t2d": ~whole["t2d"]}, {**whole, "d2t": whole["d2t"] - 9}):
        save_file(damaged, path)
        with pytest.raises(UserError, match="vocabulary map"):
            read_vocab(path)
    path.write_bytes(b"no tensors")
    with pytest.raises(UserError, match="Delete its folder"):
        read_vocab(path)


def test_vocabulary_is_the_most_frequent_with_ties_by_id_and_ends() -> None:
    rows = make_rows(ROWS, META)
    assert Counter(rows.ids[predicted(rows)].tolist()) == {1: 3, 7: 1, 6: 1, 4: 1}
    assert build_vocab(rows, 3, 12, [1]).kept_ids.tolist() == [1, 4, 6]
    assert build_vocab(rows, 3, 12, [1, 11]).kept_ids.tolist() == [1, 4, 11]
    assert build_vocab(rows, 6, 12, [1]).kept_ids.tolist() == [0, 1, 2, 4, 6, 7]
    assert build_vocab(rows, 0, 12, [1]).full and build_vocab(rows, 12, 12, [1]).full


def test_coverage_by_source_and_category() -> None:
    rows = make_rows(ROWS, META)
    covered = coverage(rows, build_vocab(rows, 2, 12, [1]))
    by_source, by_category = {"a": 1 / 3, "b": 1.0}, {"x": 1 / 3, "y": 1.0}
    assert covered == {"tokens": 6, "overall": 4 / 6, "by_source": by_source, "by_category": by_category}
    (warning,) = low_coverage(covered, "training")
    assert warning.endswith("less than 95% of the training tokens: all 66.7%, source a 33.3%, category x 33.3%")
    assert low_coverage(coverage(rows, VocabMap.identity(12)), "training") == []
    assert low_coverage(coverage(rows.subset([]), build_vocab(rows, 2, 12, [1])), "validation") == []
