"""The training benchmark on a tiny shape: it counts what it says, and writes what it prints."""

import json
from pathlib import Path

import pytest

from recipes.schema import UserError
from scripts import bench_train

SMALL = ["shapes=tiny", "rows=2", "length=32", "rounds=1", "warm=0", "device=cpu"]


def test_all_arms_run_and_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bench.json"
    bench_train.main([*SMALL, "arms=ours,products,attention", f"out={out}"])
    written = json.loads(out.read_text())
    (result,) = written["results"]
    assert result["slots"] == {"ours": [64] * 7}, "every slot counts at every unroll step"
    assert result["arms"].keys() == {"ours", "products", "attention"}
    assert all(arm["ms"] > 0 for arm in result["arms"].values()) and "CPU" in written["hardware"]
    assert "bare products and attention over ours" in capsys.readouterr().out


def test_half_supervised_rows_hold_about_half(tmp_path: Path) -> None:
    marks = bench_train.Case(16, 2048, 0.5).answers()
    assert 0.4 < (marks > 0).double().mean() < 0.6
    runs = [len(list(run)) for row in marks.tolist() for run in split(row)]
    assert max(runs) <= 1024 and len(runs) > 16


def split(marks: list[int]) -> list[list[int]]:
    """The answers of a row."""
    return [[m for m in marks if m == k] for k in sorted(set(marks)) if k]


WRONG = [
    ("size=3", "no such key: size=3"),
    ("sweep", "no such key: sweep"),
    ("objective=xx", "'xx' is none of soft_ce"),
    ("dtype=bfloat16", "none of auto, bf16, fp32"),
    ("recompute=True", "none of true, false"),
    ("arms=ours,foo", "'foo' is none of"),
    ("warm=-1", "a whole number, 0 or more"),
    ("rounds=0", "a whole number, 1 or more"),
    ("out=/nowhere/at/all.json", "there is no folder /nowhere/at"),
]


@pytest.mark.parametrize(("word", "said"), WRONG)
def test_words_that_mean_nothing_are_refused_before_anything_is_measured(word: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        bench_train.main([word])
