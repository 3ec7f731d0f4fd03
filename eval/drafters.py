"""The kinds of drafters that the engine decodes with, and each beside the text that it drafts for."""

from dataclasses import replace

from eval.blocks import BlockDrafting
from eval.drafting import EagleDrafting
from eval.flex import FlexDrafting
from eval.settings import BLOCKED, GROWN
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
    """The recipe as this drafter can serve it."""
    return served(recipe, drafter.config.block_size if isinstance(drafter, FlexDraft) else 0)


def served(recipe: Recipe, block: int) -> Recipe:
    """The recipe as a drafter of lines with so many masks a group can serve it: decoders that want trees are left out,
    `flex` stands for EAGLE's own, all lines are as long as `chain`'s, within a block, and all are greedy unless the
    recipe says otherwise. For one of trees (block 0) `flex` and its mode are left out."""
    e, known = recipe.eval, BLOCKED if block else GROWN
    kind = "drafts lines" if block else "is no FlexDraft"
    if recipe.decoder in DRAFTED and recipe.decoder not in known:
        raise UserError(f"decoder={recipe.decoder} is not for this drafter, which {kind}. Use {', '.join(known)}")
    names = ["flex" if name == "eagle" and block else name for name in e.decoders]
    names = [name for name in dict.fromkeys(names) if name not in DRAFTED or name in known]
    if e.decoders and not names:
        given = ", ".join(e.decoders)
        raise UserError(f"eval.decoders=[{given}]: none is for this drafter, which {kind}. Use {', '.join(known)}")
    if not block:
        return replace(recipe, eval=replace(e, decoders=names, flex_mode="sequential"))
    length = min(e.chain_length, block - 1)
    e = replace(e, decoders=names, chain_length=length, depth=length)
    if e.verifier == "auto" and not e.draft_temperature:
        e = replace(e, verifier="match", draft_temperature=0.0)
    return replace(recipe, eval=e)
