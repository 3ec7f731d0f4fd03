"""TALON (arXiv 2601.07353): a draft tree grown by confidence, deep where the drafter is sure and wide where it is not.

B rows, k branch, W frontier nodes of a layer, U uncommitted drafter slots, H hidden.
"""

import math
from functools import partial

import torch
from torch import Tensor

from eval.drafting import UNGATED, EagleDrafting, Frontier
from models.capture import Steps

RATIO = 0.03  # of the layer's best path probability, below which a candidate is dropped


def talon(drafting: EagleDrafting, depth: int, branch: int, nodes: int, steps: Steps, fixed: bool) -> Frontier:
    """Layers until every row has its `nodes`, or `depth` of them (the paper has no such cap): a look at the device a
    layer. Every kept node is expanded into its `branch` best children, so the frontier is as wide as the last layer.

    Layers hold kept nodes alone, padded by ones that score -inf to the widest possible layer, or where shapes are not
    `fixed` to the widest one found.
    """
    first = min(branch, nodes)  # kept whole as far as the budget goes
    f = steps.run(("open", first), lambda: drafting.open(first))
    used = f.tokens.shape[1]
    while f.level < depth and used < nodes:
        width = min(f.tokens.shape[1] * branch, nodes - used)
        f, running = steps.run(("talon", f.level), partial(grow, drafting, f, branch, nodes, width))
        if not bool(running):
            break
        if not fixed:
            f = trimmed(f)
        used += 1  # each layer has at least the node that is its best
    return f


def kept(f: Frontier) -> Tensor:
    """Nodes so far, a row [B]."""
    return torch.cat([scores for _, _, scores in f.layers], 1).isfinite().sum(1)


@torch.no_grad()
def grow(drafting: EagleDrafting, f: Frontier, branch: int, nodes: int, width: int) -> tuple[Frontier, Tensor]:
    """One layer more: of all children those within RATIO of the layer's best, the best first, as far as the budget
    goes; and whether some row that is alive has budget left [] bool."""
    B = len(f.tokens)
    states = drafting.drafter.step(f.states, drafting.target.embed(f.tokens), drafting.cache, f.level - 1, f.ancestors)
    logp, grown = drafting.top(states, branch)
    scores = (f.scores.unsqueeze(2) + logp).flatten(1)
    scores, picked = (part[:, :width] for part in scores.sort(dim=1, descending=True, stable=True))
    left = (nodes - kept(f)).unsqueeze(1)
    near = scores >= scores[:, :1] + math.log(RATIO)
    near &= torch.arange(scores.shape[1], device=scores.device) < left
    scores = scores.masked_fill(~near, float("-inf"))
    above = picked // grown.shape[2]
    tokens, parents = grown.flatten(1).gather(1, picked), f.index.gather(1, above) + 1
    index = f.drafted + torch.arange(scores.shape[1], device=scores.device).expand(B, -1)
    f = f.grown((tokens, parents, scores), (tokens, scores, index, above), states)
    return f, ((kept(f) < nodes) & (f.stage == UNGATED)).any()  # a row that has ended holds no other


def trimmed(f: Frontier) -> Frontier:
    """The last layer no wider than its fullest row: kept nodes come first."""
    width = max(1, int(f.scores.isfinite().sum(1).max()))
    tokens, parents, scores = (part[:, :width] for part in f.layers[-1])
    unused = f.tokens.shape[1] - width
    return Frontier(
        layers=(*f.layers[:-1], (tokens, parents, scores)),
        tokens=tokens,
        scores=scores,
        index=f.index[:, :width],
        states=f.states[:, :width],
        ancestors=f.ancestors[:, :width, : f.ancestors.shape[2] - unused],
        stage=f.stage,
        level=f.level,
    )
