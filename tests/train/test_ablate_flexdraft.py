"""The ablation script on a tiny target: a page with every variant and both modes, and a second run goes on from it."""

from pathlib import Path

import pytest

from recipes.loading import load
from scripts import ablate_flexdraft
from tests.train.test_eagle import prompts


@pytest.mark.slow
def test_the_page_has_every_variant_and_mode(model_folder: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(
        f"""
target: {{path: {model_folder}}}
data:
  sources: {{mine: {{kind: file, path: {prompts(tmp_path / "training.jsonl", 12, 0)}}}}}
  max_length: 96
  answer_tokens: 24
  drop_loops: false
  validation_rows: 2
  cache: {tmp_path / "cache"}
flex: {{anchors: 3, calibrator_rank: 8, lora_rank: 2}}
train: {{batch_tokens: 400, micro_batch_tokens: 200, max_steps: 2, learning_rate: 1.0e-3}}
eval: {{prompts: {prompts(tmp_path / "report.jsonl", 4, 11)}, max_new_tokens: 12, batch_sizes: [1, 2]}}
"""
    )
    given = load([f"recipe={recipe}", f"run_dir={tmp_path / 'run'}", f"out={tmp_path / 'page.md'}"])
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
    taus = [[line.split("|")[4] for line in text.splitlines() if line.startswith("| ") and " layers" in line] for text in (page, again)]
    assert taus[0] == taus[1]
