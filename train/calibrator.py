"""Fit the calibrator of a trained FlexDraft drafter, whose masks stay as they are, and say what both are worth.

    accelerate launch train/calibrator.py recipe=smollm2 flexdraft=RUN_DIR run_dir=DIR [flex.calibrator_rank=256]

The same command again goes on where the run folder stands.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, from any folder

from data_prep.run import Prepared
from eval.drafters import Drafter
from models.flex_layout import check_flexdraft, is_flexdraft, load_flexdraft, masks_hash
from models.flexdraft import Calibrator, FlexDraft
from models.source import Source
from models.target import Target
from recipes.cli import entry
from recipes.files import run_folder, user_path
from recipes.schema import Recipe, UserError
from train import run
from train.cost import calibrator_cost, kept_features
from train.flex_objective import CalibratorLoss, Learning
from train.flexdraft import FlexFamily
from train.objective import Objective


class CalibratorFamily(FlexFamily):
    title, goes_on = "Calibrated FlexDraft", True
    whole: FlexDraft  # the masks, with a calibrator

    def check(self, recipe: Recipe, source: Source | None) -> None:
        super().check(recipe, source)
        if recipe.dry_run and recipe.flexdraft and not user_path(recipe.flexdraft).is_dir():
            print(f"no FlexDraft drafter in {recipe.flexdraft} yet")
            return
        folder = start_of(recipe)
        if folder.parent.resolve() == run_folder(recipe).resolve():
            raise UserError(f"run_dir={run_folder(recipe)} is the run that is gone on from: give another run_dir=DIR")
        config = check_flexdraft(folder, source)
        if config.block_size != recipe.flex.block_size:
            raise UserError(
                f"flex.block_size={recipe.flex.block_size}, but the masks in {folder} were trained in blocks of "
                f"{config.block_size}: give flex.block_size={config.block_size}"
            )
        if config.calibrator_rank and run.rank() == 0:
            print(
                f"note: the masks in {folder} have a calibrator (rank {config.calibrator_rank}). A new one takes its "
                "place in this run, from zero; that folder stays as it is",
                flush=True,
            )

    def hashes(self, recipe: Recipe) -> dict[str, str]:
        there = user_path(recipe.flexdraft).is_dir()  # or a dry run
        return {"flexdraft.weights": masks_hash(start_of(recipe))} if there else {}

    def cost(self, recipe: Recipe, prompts: int) -> str:
        return calibrator_cost(recipe, prompts)

    def objective(
        self, recipe: Recipe, target: Target, teacher: Target, prepared: Prepared, bf16: bool
    ) -> tuple[Objective, Prepared]:
        masks = load_flexdraft(start_of(recipe), target, adapters=True)
        self.whole = FlexDraft(replace(masks.config, calibrator_rank=recipe.flex.calibrator_rank)).to(target.device)
        learned = {name: t for name, t in masks.state_dict().items() if not name.startswith("calibrator.")}
        self.whole.load_state_dict(self.whole.state_dict() | learned)
        learning = Learning(recipe.flex, recipe.seed, bf16, kept_features(recipe))
        return CalibratorLoss(self.whole.eval(), teacher, learning), prepared

    def drafter(self, trained: Any) -> Drafter:
        assert isinstance(trained, Calibrator)
        self.whole.calibrator = trained
        return self.whole


def start_of(recipe: Recipe) -> Path:
    """The drafter's folder that `flexdraft` names, by itself or by its run's."""
    if not recipe.flexdraft:
        raise UserError("flexdraft=RUN_DIR is missing: the run of train/flexdraft.py whose masks are to be calibrated")
    folder = user_path(recipe.flexdraft)
    for found in (folder, folder / "drafter"):
        if is_flexdraft(found):
            return found
    raise UserError(f"flexdraft={folder}: no FlexDraft drafter there. Give the folder of a finished train/flexdraft.py")


def main(recipe: Recipe) -> None:
    run.main(recipe, CalibratorFamily())


if __name__ == "__main__":
    entry(run.one_screen(main))
