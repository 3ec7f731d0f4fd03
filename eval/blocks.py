"""Drafters that propose a whole line in one pass, and Graft on them (arXiv 2605.20104, appendix F).

B rows, L drafts.
"""

from typing import Protocol

import torch
from torch import Tensor

from eval.matrix import SuccessorMatrix
from eval.tree import DRAFTER, RETRIEVAL, DraftTree
from models.cache import KVCache
from models.target import States


class BlockDrafting(Protocol):
    """A block drafter beside the committed text, as the engine asks it; `eval.drafting.EagleDrafting` says what its
    cache, `part` and `extend` are for."""

    cache: KVCache
    ready: bool  # the next block is drafted already: `block` looks at it, and the host alone changes it

    def part(self, rows: slice) -> "BlockDrafting": ...

    def extend(self, taps_BTC: Tensor, next_ids_BT: Tensor, counts_B: Tensor, counts: list[int] | None) -> None: ...

    def verify(self, ids_BT: Tensor, cache: KVCache) -> States:
        """Asked instead of `Target.forward` where settings.parallel: it drafts the next block besides."""

    def block(self, length: int) -> tuple[Tensor, Tensor]:
        """The likeliest tokens after the root, the token that was said last, and the log-probability of each [B, L]:
        one pass, in which nothing depends on the host."""


def confident(logp_BL: Tensor, bar: float) -> Tensor:
    """bool [B, L]: the drafts that are kept, until the product of the probabilities falls below exp(`bar`).

    The drafts are greedy, so what is kept does not depend on any draw, and verification stays lossless.
    """
    return logp_BL.float().cumsum(1) >= bar


def filled(
    roots_B: Tensor, tokens_BL: Tensor, logp_BL: Tensor, kept_BL: Tensor, matrix: SuccessorMatrix | None
) -> DraftTree:
    """A line: the drafts that are kept, behind them the matrix's first guess after each token, until one is cold;
    without a matrix the kept drafts alone."""
    said = [roots_B]
    for j in range(tokens_BL.shape[1]):
        guess = torch.full_like(roots_B, -1)
        if matrix is not None:
            guess = torch.where(said[-1] >= 0, matrix.rows[said[-1].clamp(min=0), 0], guess)
        said.append(torch.where(kept_BL[:, j], tokens_BL[:, j], guess))
    tokens = torch.stack(said, 1)
    drafted = torch.cat([torch.ones_like(kept_BL[:, :1]), kept_BL], 1)
    scores = torch.cat([torch.zeros_like(logp_BL[:, :1]), logp_BL], 1).float().cumsum(1)
    place = torch.arange(tokens.shape[1], device=tokens.device)
    return DraftTree(
        tokens.clamp(min=0),
        (place - 1).clamp(min=0).expand_as(tokens),
        scores.masked_fill(~drafted, -1e9),
        torch.where(drafted, DRAFTER, RETRIEVAL),
        tokens >= 0,
        tokens.shape[1] - 1,
    )
