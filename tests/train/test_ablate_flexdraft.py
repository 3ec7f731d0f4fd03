"""The ablation script on a tiny target: a page with every variant and both modes, and a second run goes on from it."""

from pathlib import Path

import pytest

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
    ablate_flexdraft.main(given)
    page = (tmp_path / "page.md").read_text()
    for arm in ablate_flexdraft.arms_of(8):
        assert f"| {arm.name} |" in page
    modes = page.partition("## Drafting in parallel")[2]
    assert "\n| 1 | " in modes and "\n| 2 | " in modes
    steps = [path.name for path in (tmp_path / "run" / "ablations").glob("*/checkpoints/step-2")]
    assert len(steps) == len(ablate_flexdraft.arms_of(8))
    ablate_flexdraft.main(given)
    again = (tmp_path / "page.md").read_text()
    assert again.count("| earlier |") == len(ablate_flexdraft.arms_of(8))
    tables = [[line for line in text.splitlines() if line.startswith("| ")] for text in (page, again)]
    taus = [[line.split("|")[4] for line in table if " layers" in line] for table in tables]
    assert taus[0] == taus[1]
