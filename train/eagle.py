"""Train an EAGLE-3 drafter for a recipe's target, and say what it is worth.

    accelerate launch train/eagle.py recipe=smollm2 [run_dir=DIR] [key=value ...]
    python train/eagle.py recipe=smollm2 dry_run=true

The same command again goes on where the run folder stands.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, from any folder

from data_prep.run import Prepared
from eval.drafters import Drafter
from models.eagle3 import Eagle3
from models.layouts import default_layout, save_drafter
from models.source import Source
from models.target import Target
from recipes.cli import entry
from recipes.schema import Recipe
from train import run, warm_start
from train.cost import kept_features, training_cost
from train.features import StoredTeacher
from train.objective import Objective, UnrollLoss


class EagleFamily(run.Family):
    title, part = "EAGLE-3", "eagle"

    def check(self, recipe: Recipe, source: Source | None) -> None:
        warm_start.check_start(recipe, source)
        size, keeps = recipe.eagle.draft_vocab, recipe.eagle.init_from and recipe.eagle.init_vocab == "keep"
        if source is not None and size > source.vocab_size and not keeps and run.rank() == 0:
            whole = f"the target has {source.vocab_size:,} tokens, and the drafter will have them all"
            print(f"eagle.draft_vocab={size}: {whole}", flush=True)

    def cost(self, recipe: Recipe, prompts: int) -> str:
        return training_cost(recipe, prompts)

    def objective(
        self, recipe: Recipe, target: Target, teacher: Target, prepared: Prepared, bf16: bool
    ) -> tuple[Objective, Prepared]:
        drafter, prepared = warm_start.make_drafter(recipe, target, prepared)
        if recipe.eagle.init_from and run.rank() == 0:
            print(warm_start.describe(recipe, target.fingerprint, prepared), flush=True)
        keep = 0 if target.sharded else kept_features(recipe)  # a rank that skips a forward leaves the others waiting
        vocab, recompute = prepared.vocab, recipe.train.recompute
        return UnrollLoss(drafter, teacher, vocab, recipe.eagle, bf16, keep, recompute), prepared

    def read_from(self, store: StoredTeacher, objective: Objective) -> None:
        assert isinstance(objective, UnrollLoss)
        objective.teacher = store

    def save(self, drafter: Drafter, folder: Path, papers: dict[str, Any]) -> None:
        """In the portable layout where it can express the drafter."""
        assert isinstance(drafter, Eagle3)
        only_vllm = default_layout(drafter.config)[1]
        if only_vllm:
            print(only_vllm, flush=True)
        save_drafter(drafter, folder, papers)


def main(recipe: Recipe) -> None:
    run.main(recipe, EagleFamily())


if __name__ == "__main__":
    entry(run.one_screen(main))
