"""The kinds of drafters that the engine decodes with, and each beside the text that it drafts for."""

from dataclasses import replace

from eval.blocks import BlockDrafting
from eval.drafting import EagleDrafting
from eval.flex import FlexDrafting
from eval.settings import BLOCKED
from models.cache import KVCache
from models.eagle3 import Eagle3
from models.flexdraft import FlexDraft
from models.target import Target
from recipes.schema import DRAFTED, Recipe, UserError

Drafter = Eagle3 | FlexDraft


def drafting_of(drafter: Drafter, target: Target, cache: KVCache, more: int) -> EagleDrafting | BlockDrafting:
    """For the rows of the target's `cache`; a round may write `more` slots of the drafter's own than of it."""
    if isinstance(drafter, FlexDraft):
        return FlexDrafting(drafter, target, cache)
    return EagleDrafting(drafter, target, cache.rows, cache.capacity + more)


def fitted(recipe: Recipe, drafter: Drafter | None) -> Recipe:
    """The recipe as this drafter can serve it: of one that drafts lines, the decoders that want trees are left out,
    with their tuner, and no draft is longer than a block."""
    if not isinstance(drafter, FlexDraft):
        if "flex" in (recipe.decoder, *recipe.eval.decoders) and drafter is not None:
            raise UserError(
                "decoder flex decodes with a FlexDraft drafter (train/flexdraft.py), and this one is EAGLE-3's"
            )
        return recipe
    if recipe.decoder in DRAFTED and recipe.decoder not in BLOCKED:
        raise UserError(f"decoder={recipe.decoder} drafts trees, and this drafter lines. Use {', '.join(BLOCKED)}")
    e, most = recipe.eval, drafter.config.block_size - 1
    kept = [name for name in e.decoders if name not in DRAFTED or name in BLOCKED]
    length, depth = min(e.chain_length, most), min(e.depth, most)
    return replace(recipe, eval=replace(e, decoders=kept, tune=False, chain_length=length, depth=depth))
