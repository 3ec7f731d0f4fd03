"""Out of memory: fewer rows at once, one size for all figures, and the other prompts still answered."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from eval import decode as decoding
from eval import harness, lossless, tune
from eval.decode import Decoded
from eval.memory import attempt, by_halving
from eval.settings import Settings
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


def test_tuning_goes_on_where_memory_runs_out_later(capsys: pytest.CaptureFixture[str]) -> None:
    """A longer prompt or answer than those of the first, short run may be too much."""

    class Fills(FakeDecode):
        def __call__(self, target: Any, drafter: Any, prompts: Any, settings: Settings, *a: Any, **k: Any) -> Decoded:
            if settings.decoder == full and len(self.calls) > 100:
                raise torch.OutOfMemoryError
            return super().__call__(target, drafter, prompts, settings, *a, **k)

    full, recipe = "eagle", fake_recipe(max_new_tokens=16)
    tuned = tune.tune(recipe, TARGET, DRAFTER, fake_prompts(20), decode=Fills())
    assert "out of memory: eagle" in capsys.readouterr().out and tuned["chosen"]["decoder"] != "eagle"
    assert set(tuned["best"]) == {"chain", "graft"} and {row["decoder"] for row in tuned["table"]} >= {"ar", "graft"}
    settings = tune.candidates(recipe, "cpu")
    grid = tune.measured_grid(recipe, TARGET, DRAFTER, fake_prompts(20), settings=settings, decode=Fills())
    assert {row["decoder"] for row in grid} == {"ar", "chain", "graft"}
    full = "ar"
    with pytest.raises(UserError, match="out of memory at batch 1"):
        tune.tune(recipe, TARGET, DRAFTER, fake_prompts(20), decode=Fills())


@pytest.mark.parametrize("full", ["time_generate", "compare_decoders", "compare_generate", "check_fp32"])
def test_what_was_measured_outlives_a_check_that_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], full: str
) -> None:
    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError

    fine = {"checked": 2, "identical": 2, "near_ties": 0, "diverged": [], "partings": []}
    speed = {"prompts": 1, "ar_tokens_per_s": 2.0, "generate_tokens_per_s": 1.0}
    both = {"decoders": {"ar": fine, "eagle": fine}, "generate": fine}
    for name, found in (
        ("time_generate", speed),
        ("compare_decoders", both["decoders"]),
        ("compare_generate", fine),
        ("check_fp32", both),
    ):
        monkeypatch.setattr(lossless, name, fails if name == full else lambda *_, found=found: found)
    half = cast(Target, FakeTarget(dtype=torch.bfloat16 if full == "check_fp32" else torch.float32))
    recipe = fake_recipe(decoders=["ar", "eagle"], lossless=2)
    tables = harness.evaluate(
        recipe, half, DRAFTER, fake_prompts(3), tmp_path, decode=FakeDecode(), load_fp32=lambda: half
    )
    assert len(tables[0]["checks"]["no_room"]) == 1 and tables[1]["overall"]["tau"]
    assert "out of memory: not checked" in capsys.readouterr().out
    assert "**Not checked, out of memory**" in (tmp_path / "report.md").read_text()


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
