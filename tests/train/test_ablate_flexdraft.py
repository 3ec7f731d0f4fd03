"""The ablation script on a tiny target: a page with every variant and both modes, and a second run goes on from it."""

from pathlib import Path

import pytest

from recipes.schema import UserError
from scripts import ablate_flexdraft
from tests.train.tiny_recipe import recipe, written


@pytest.mark.slow
def test_the_page_has_every_variant_and_mode(model_folder: Path, tmp_path: Path) -> None:
    changes = """
data: {answer_tokens: 24, validation_rows: 2}
flex: {anchors: 3, calibrator_rank: 8, lora_rank: 2}
train: {max_steps: 2}
eval: {batch_sizes: [1, 2]}
"""
    arguments = written(tmp_path, model_folder, 12, 4, changes)
    given = recipe(arguments, tmp_path / "run", f"out={tmp_path / 'page.md'}")
    ablate_flexdraft.main(given, "0,8")
    ablate_flexdraft.main(given, "9")
    assert not (tmp_path / "page.md").exists()
    ablate_flexdraft.main(given)
    page = (tmp_path / "page.md").read_text()
    for arm in ablate_flexdraft.arms_of(8):
        assert f"| {arm.name} |" in page
    modes = page.partition("## Drafting in parallel")[2]
    assert "\n| 1 | " in modes and "\n| 2 | " in modes
    steps = [path.name for path in (tmp_path / "run" / "ablations").glob("*/checkpoints/step-2")]
    assert len(steps) == len(ablate_flexdraft.arms_of(8)) - 2, "three chains of one EAGLE-3 drafter"
    ablate_flexdraft.main(given)
    again = (tmp_path / "page.md").read_text()
    tables = [[line for line in text.splitlines() if line.startswith("| ")] for text in (page, again)]
    variants = [[line for line in table if line.count("|") == 8] for table in tables]
    assert variants[0] == variants[1] and len(variants[0]) == 1 + len(ablate_flexdraft.arms_of(8))


def test_unknown_arms_are_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"arms=0,99: give numbers.*\n  0: 3 layers, full copies, block 16"):
        ablate_flexdraft.chosen(ablate_flexdraft.arms_of(8), "0,99")
