"""What the report says of a FlexDraft's calibrator and of Graft on its drafts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.prompts import Prompt
from eval import flex_report, harness, stats
from eval.decode import RowResult
from models.flexdraft import FlexDraft, FlexDraftConfig
from models.target import Target
from recipes.schema import EvalConfig, Recipe

SIZE = 5


def row(accepted: list[int], drafted: list[int]) -> RowResult:
    return RowResult(
        rounds=len(accepted),
        emitted=sum(accepted) + len(accepted),
        accepted_per_round=accepted,
        drafted_depth_per_round=drafted,
    )


def test_acceptance_is_counted_behind_what_was_accepted_before() -> None:
    """By hand; the last round of each row is left out."""
    found = flex_report.figures([row([2, 0, 2, 1], [3, 2, 3, 3]), row([0, 1], [2, 3])])
    assert found["tau"] == pytest.approx(12 / 6)
    assert found["by_accepted_before"] == [
        {"accepted_before": -1, "rounds": 2, "acceptance_by_position": [1 / 2, 1 / 2, 0.0]},
        {"accepted_before": 0, "rounds": 1, "acceptance_by_position": [1.0, 1.0, 0.0]},
        {"accepted_before": 2, "rounds": 1, "acceptance_by_position": [0.0, 0.0]},
    ]
    assert found["acceptance_by_position"] == [2 / 4, 2 / 4, 0.0]


def test_the_paired_difference_has_the_sign_of_every_prompt() -> None:
    low, high = stats.difference_interval([4, 6, 5], [4, 4, 4], [5, 7, 6], [4, 4, 4]) or (0, 0)
    assert low == pytest.approx(0.25) and high == pytest.approx(0.25)
    assert stats.difference_interval([1], [1], [1], [1]) is None


@pytest.fixture(scope="module")
def evaluated(tiny_target: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A calibrator that knows the target's answers to two prompts by heart, on masks that know nothing."""
    target: Target = tiny_target("llama")
    drafter = FlexDraft(FlexDraftConfig.from_target(target, 3, SIZE, 32))
    drafter.init_from_target(target, [torch.arange(20)])
    out = tmp_path_factory.mktemp("report")
    e = EvalConfig(max_new_tokens=24, decoders=["ar", "flex", "graft"], matrix="carried", chain_length=4, lossless=-1)
    prompts = [Prompt(f"p{i}", [text], "chat") for i, text in enumerate(("the fox", "a lazy dog", "jumps over"))]
    return harness.evaluate(Recipe(eval=e), target, drafter.eval(), prompts, out), out


def test_the_report_shows_the_calibrator_without_and_with(evaluated: tuple[Any, Path]) -> None:
    found = json.loads((evaluated[1] / "calibration.json").read_text())
    flagged = evaluated[0][0]["overall"]["loops"]["flagged"]
    assert found["prompts"] == 3 - flagged > 0 and found["settings"]["depth"] == 4
    assert found["without"] == found["with"] and found["tau_gain"] == 0  # it starts from zero
    page = (evaluated[1] / "report.md").read_text()
    assert "## What the calibrator brings" in page and "without the calibrator" in page
    assert f"| none: after the prompt | without | {3 - flagged} |" in page and "| all | with |" in page


def test_graft_beside_flex_says_who_drafted_what_was_accepted(evaluated: tuple[Any, Path]) -> None:
    tables = {table["decoder"]: table for table in evaluated[0]}
    graft, flex = tables["graft"], tables["flex"]
    assert graft["settings"]["depth"] == flex["settings"]["depth"] == 4
    assert graft["overall"]["accepted_by_source"]["retrieval"] > 0
    assert flex["overall"]["accepted_by_source"]["retrieval"] == 0
    assert graft["against"]["decoder"] == "flex"
    page = (evaluated[1] / "report.md").read_text()
    assert "% from retrieval" in page and "Retrieval at the same budget (graft beside flex): tau" in page
