"""Out of memory: fewer rows at once, one size for all figures, and the other prompts still answered."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from eval import decode as decoding
from eval import harness, tune
from eval.decode import Decoded
from eval.memory import attempt, by_halving
from models.target import Target
from recipes.schema import UserError
from tests.eval.fakes import FakeDecode, FakeTarget, fake_drafter, fake_prompts, fake_recipe

TARGET, DRAFTER = cast(Target, FakeTarget()), fake_drafter()


@dataclass
class Cramped(FakeDecode):
    """A machine whose memory holds so many tokens of prompts at once."""

    room: int = 10**9

    def __call__(self, target: Any, drafter: Any, prompts: list[list[int]], *more: Any, **named: Any) -> Decoded:
        if sum(sorted(map(len, prompts))[-named.get("slots", 0) :]) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().__call__(target, drafter, prompts, *more, **named)


def test_only_want_of_memory_is_caught() -> None:
    def fails(error: Exception) -> Any:
        raise error

    assert attempt(lambda: 3) == 3
    assert attempt(lambda: fails(MemoryError())) is None
    assert attempt(lambda: fails(RuntimeError("DefaultCPUAllocator: can't allocate memory: 12 bytes"))) is None
    assert attempt(lambda: fails(RuntimeError("CUDA error: out of memory"))) is None
    with pytest.raises(RuntimeError, match="shapes"):
        attempt(lambda: fails(RuntimeError("shapes differ")))


def test_an_error_that_want_of_memory_left_behind_is_want_of_memory() -> None:
    """Where memory runs out while a step is recorded, ending the recording fails too."""

    def records() -> Any:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    assert attempt(records) is None


@pytest.mark.parametrize(
    ("room", "expected"), [(9, [8]), (8, [8]), (3, [8, 4, 2]), (1, [5, 3, 2, 1]), (0, [5, 3, 2, 1]), (0, [1])]
)
def test_half_as_many_rows_are_tried_until_they_fit(room: int, expected: list[int]) -> None:
    tried: list[int] = []

    def run(slots: int) -> str:
        tried.append(slots)
        if slots > room:
            raise torch.OutOfMemoryError
        return "done"

    if room:
        assert by_halving(expected[0], run) == "done"
    else:
        with pytest.raises(UserError, match="single row"):
            by_halving(expected[0], run)
    assert tried == expected


def test_the_largest_batch_that_fits_is_measured_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decode = Cramped(room=4 * 40)
    prompts = fake_prompts(8)
    recipe = fake_recipe(batch_size=8, decoders=["ar", "chain"])
    tables = harness.evaluate(recipe, TARGET, DRAFTER, prompts, decode=decode, out=tmp_path / "out", warmup=prompts[:0])
    for table in tables:
        assert table["overall"]["prompts"] == 8
        assert table["settings"]["batch_size"] == 4
        assert table["out_of_memory"] == [8]
    assert "out of memory at batch 8: trying 4" in capsys.readouterr().out
    assert "Out of memory at batch 8: **measured at 4**" in (tmp_path / "out" / "report.md").read_text()


def test_a_prompt_that_does_not_fit_alone_is_left_out_and_named(tmp_path: Path) -> None:
    prompts = [*fake_prompts(3), *fake_prompts(60)[-1:]]
    decode = Cramped(room=60)
    recipe = fake_recipe(batch_size=2, decoders=["ar", "chain"])
    tables = harness.evaluate(recipe, TARGET, DRAFTER, prompts, decode=decode, out=tmp_path / "out", warmup=prompts[:0])
    assert [row["id"] for row in tables[0]["per_prompt"]] == ["p0", "p1", "p2"]
    assert tables[0]["skipped"] == [{"id": "p59", "turn": 1, "reason": "out of memory"}]
    assert "Out of memory even alone, left out: p59." in (tmp_path / "out" / "report.md").read_text()


def test_nothing_fits() -> None:
    recipe = fake_recipe(decoders=["ar"])
    with pytest.raises(UserError, match="out of memory: ar does not fit at batch 1"):
        harness.evaluate(recipe, TARGET, DRAFTER, fake_prompts(2), decode=Cramped(room=3))
    with pytest.raises(UserError, match="no prompt fits"):
        harness.evaluate(recipe, TARGET, DRAFTER, fake_prompts(2), decode=Cramped(room=3), warmup=[])


def test_tuning_leaves_out_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    class NoTrees(FakeDecode):
        def __call__(self, target: Any, drafter: Any, prompts: Any, settings: Any, *more: Any, **named: Any) -> Decoded:
            if settings.decoder == "eagle" and settings.nodes > 3:
                raise torch.OutOfMemoryError
            return super().__call__(target, drafter, prompts, settings, *more, **named)

    tuned = tune.tune(fake_recipe(max_new_tokens=16), TARGET, DRAFTER, fake_prompts(20), decode=NoTrees())
    assert max(row["nodes"] for row in tuned["table"] if row["decoder"] == "eagle") == 3
    assert "out of memory: eagle, 4 nodes" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"out of memory at batch 4\. Try 2"):
        tune.tune(fake_recipe(batch_size=4), TARGET, DRAFTER, fake_prompts(20), decode=Cramped(room=60))


def test_engines_are_let_go_when_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def decode(*_: Any, engines: Any) -> Decoded:
        seen.append(id(engines))
        kept.append(engines)
        if len(seen) == 2:
            raise torch.OutOfMemoryError
        return Decoded([], {}, 0.0, 0)

    kept: list[Any] = []
    monkeypatch.setattr(decoding, "decode", decode)
    keeping = decoding.decode_keeping()
    keeping()
    assert attempt(keeping) is None
    keeping()
    assert seen[0] == seen[1] != seen[2]


def test_a_model_too_short_for_the_answer_is_said_so() -> None:
    target = cast(Target, FakeTarget(max_positions=64))
    with pytest.raises(UserError, match=r"eval\.max_new_tokens=64 leaves no room for a prompt: the target has 64 pos"):
        harness.evaluate(fake_recipe(max_new_tokens=64), target, DRAFTER, fake_prompts(2), decode=FakeDecode())
