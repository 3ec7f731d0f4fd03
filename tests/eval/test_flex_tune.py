"""The tuner on a FlexDraft drafter: the mode is measured at each batch size, and where nothing pays it is off."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from eval import tune, tunings
from eval.decode import decode_keeping
from eval.drafters import fitted
from eval.plan import plan
from eval.settings import Settings
from models.flexdraft import FlexDraft, FlexDraftConfig
from models.target import Target
from recipes.schema import Recipe
from tests.eval.fakes import FakeDecode, FakeTarget, fake_prompts, fake_recipe

SIZE = 6
DRAFTER = FlexDraft(FlexDraftConfig(8, 2, 1, 4, 1e-6, 128, 4, 3, SIZE, False, False, False, 0))
TARGET, PROMPTS = cast(Target, FakeTarget()), fake_prompts(40)
SHAPE = ("decoder", "depth", "branch", "nodes", "parallel")


def recipe(size: int = 1, **changes: Any) -> Recipe:
    names = ["ar", "chain", "eagle", "prune", "graft"]
    given: dict[str, Any] = {"decoders": names, "batch_size": size, "max_new_tokens": 64, **changes}
    return fitted(fake_recipe(**given), DRAFTER)


def machine(rate: float) -> Callable[[int], FakeDecode]:
    """A group behind every candidate costs rows, a tenth of a ms each; a second pass for one group costs six ms."""

    def at(size: int) -> FakeDecode:
        def cost(s: Settings) -> float:
            rows = size * (1 + s.most) * (1 + SIZE if s.parallel else 1)
            return 20 + 0.1 * rows + (0.0 if s.parallel or not s.drafts else 6.0)

        def accepts(s: Settings) -> float:
            return sum(rate**k for k in range(1, s.depth + 1)) if s.drafts else 0.0

        return FakeDecode(accepts=accepts, cost=cost, drafting=lambda s: 0.0 if s.parallel or not s.drafts else 6.0)

    return at


def tuned(size: int, rate: float = 0.8, **changes: Any) -> dict[str, Any]:
    given = recipe(size, **changes)
    found = tune.tune(given, TARGET, DRAFTER, PROMPTS, decode=machine(rate)(size))
    settings = tune.candidates(given, "cpu", DRAFTER)
    found["grid"] = tune.measured_grid(given, TARGET, DRAFTER, PROMPTS, settings=settings, decode=machine(rate)(size))
    return found


def test_the_mode_is_what_was_faster_at_the_batch_size() -> None:
    found = [tuned(size) for size in (1, 16)]
    assert [each["best"]["flex"]["parallel"] for each in found] == [True, False]
    for size, each, parallel in zip((1, 16), found, (True, False), strict=True):
        rows = {entry.label: entry.settings for entry in plan(recipe(size), each)}
        assert rows["flex"].parallel is parallel and rows["flex"].depth == each["best"]["flex"]["depth"]
        assert rows["flex"].gates == tuple(each["best"]["flex"]["gates"])
        assert tune.shortfall(each["grid"], each["chosen"]) < 0.03
    lines = tunings.crossover(found)
    assert lines[0].startswith("flex at batch 1: parallel (") and lines[1].startswith("flex at batch 16: sequential (")


def test_it_is_off_where_speculation_cannot_pay() -> None:
    found = tuned(16, rate=0.05)
    assert found["chosen"]["decoder"] == "ar" and not found["speculate"]
    assert tunings.choice(found).startswith("off") and ": off (" in tunings.crossover([found])[0]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_candidates_are_lines_within_a_block_of_the_modes_that_are_asked_for(device: str) -> None:
    found = tune.candidates(recipe(), device, DRAFTER)
    assert len(set(found)) == len(found)
    assert {s.decoder for s in found} == {"ar", "chain", "flex", "prune", "graft"}
    assert max(s.depth for s in found if s.drafts) == SIZE - 1 and all(s.nodes == s.depth for s in found if s.drafts)
    assert {s.decoder for s in found if s.parallel} == {"flex", "graft"}
    assert len({s.gates for s in found if s.decoder == "flex"}) == (3 if device == "cpu" else 1)
    for mode in ("parallel", "sequential"):
        named = tune.candidates(recipe(flex_mode=mode), device, DRAFTER)
        assert {s.parallel for s in named if s.decoder == "flex"} == {mode == "parallel"}
    sampled = tune.candidates(recipe(temperature=1.0), device, DRAFTER)
    assert not any(s.samples for s in sampled)


def test_a_changed_mode_asks_for_new_tuning(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"a drafter")
    tunings.write(tmp_path, tuned(1))
    assert tunings.read(tmp_path, recipe(1), TARGET) is not None
    assert tunings.read(tmp_path, recipe(1, flex_mode="parallel"), TARGET) is None
    assert "flex_mode" in capsys.readouterr().out


def test_candidates_run(tiny_target: Callable[..., Any]) -> None:
    """The real decoders through the tuner, drafting in parallel at batch 2."""
    target = tiny_target("llama")
    drafter = FlexDraft(FlexDraftConfig.from_target(target, 2, SIZE))
    drafter.init_from_target(target, [torch.arange(20)])
    given = fitted(replace(recipe(2), target=replace(recipe().target, template_args={})), drafter)
    every = [replace(s, max_new_tokens=8) for s in tune.candidates(given, "cpu", drafter)]
    few = [s for s in every if not s.drafts or (s.parallel and s.depth == 3 and s.gates[0] == 0.1)]
    found = tune.tune(given, target, drafter, PROMPTS[:4], decode=decode_keeping(), budget=0.0, settings=few)
    kinds = {(row["decoder"], row["parallel"]) for row in found["table"]}
    assert kinds == {("ar", False), ("flex", True), ("graft", True)}
    assert all(row["tokens"] > 0 and row["ms_per_round"] > 0 for row in found["table"])
