"""Train a FlexDraft drafter for a recipe's target (attention of its own in the last layers), and say what it is worth.

    accelerate launch train/flexdraft.py recipe=smollm2 [run_dir=DIR] [flex.key=value ...]
    python train/flexdraft.py recipe=smollm2 dry_run=true

The same command again goes on where the run folder stands.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, from any folder

from data_prep.rows import Rows
from data_prep.run import Prepared
from data_prep.supervision import supervised
from eval.drafters import Drafter
from models.flex_layout import save_flexdraft
from models.flexdraft import FlexDraft, FlexDraftConfig, check_layers
from models.source import Source
from models.target import Target
from recipes.cli import entry
from recipes.schema import Recipe, UserError
from train import run
from train.cost import flexdraft_cost, kept_features
from train.flex_objective import FlexLoss, Learning
from train.objective import Objective

SEEN = 8  # rows that the mask vector starts from


class FlexFamily(run.Family):
    title, part = "FlexDraft", "flex"
    shards = False  # they run through the target's layers, whole ones

    def block(self, recipe: Recipe) -> int:
        return recipe.flex.block_size

    def check(self, recipe: Recipe, source: Source | None) -> None:
        if recipe.target.shard == "always":
            raise UserError("FlexDraft's masks run through layers of the target, whole ones. Use target.shard=never")
        if recipe.data.states != "none":
            raise UserError(
                "data.states keeps what EAGLE-3 reads; FlexDraft reads keys of the late layers: set it to none"
            )
        if source is not None:
            check_layers(recipe.flex.layers, source.n_layers)
            if recipe.flex.parametrisation == "lora" and recipe.flex.lora_rank >= source.hidden_size:
                raise UserError(
                    f"flex.lora_rank={recipe.flex.lora_rank} is no low rank: the target's hidden size is "
                    f"{source.hidden_size}. Use fewer, or flex.parametrisation=full"
                )

    def cost(self, recipe: Recipe, prompts: int) -> str:
        return flexdraft_cost(recipe, prompts)

    def objective(
        self, recipe: Recipe, target: Target, teacher: Target, prepared: Prepared, bf16: bool
    ) -> tuple[Objective, Prepared]:
        cfg = recipe.flex
        ranks = cfg.calibrator_rank * cfg.calibrator, cfg.lora_rank * (cfg.parametrisation == "lora")
        whole = cfg.parametrisation == "layers"
        config = FlexDraftConfig.from_target(target, cfg.layers, cfg.block_size, *ranks, whole=whole)
        drafter = FlexDraft(config).to(target.device)
        refuse_short(prepared.train)
        drafter.init_from_target(target, [ids for ids, _ in first_rows(prepared.train)])
        return FlexLoss(drafter, teacher, Learning(cfg, recipe.seed, bf16, kept_features(recipe))), prepared

    def save(self, drafter: Drafter, folder: Path, papers: dict[str, Any]) -> None:
        assert isinstance(drafter, FlexDraft)
        save_flexdraft(drafter, folder, papers)


def refuse_short(rows: Rows) -> None:
    """Where no row has an anchor: a position with two tokens of one answer behind it."""
    if not any(bool(supervised(rows.row(i)[1], 1).any()) for i in range(len(rows.lengths))):
        raise UserError(
            f"none of the {len(rows.lengths):,} training rows has an anchor: a position with two tokens of one answer "
            "behind it. Raise data.answer_tokens or data.max_length, or give other prompts."
        )


def first_rows(rows: Rows) -> list[Any]:
    return [rows.row(i) for i in range(min(SEEN, len(rows.lengths)))]


def main(recipe: Recipe) -> None:
    run.main(recipe, FlexFamily())


if __name__ == "__main__":
    entry(run.one_screen(main))
