"""Sums over the vocabulary of what two laws leave: all that the rules ask of whole laws until a round has ended.

B rows, R nodes of each, N and M as in eval.verify.Drafts, V vocabulary. Coefficients are float64, one a node, or
numbers.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mix:
    """What is left of a target q beside a draft p: (weight q - minus p - up share)+, where the share min(p, (gain q -
    cost p)+) is a part of p. With all but `up` = -1, gain and cost at 0 it is the share."""

    weight: Tensor | float = 0.0
    minus: Tensor | float = 0.0
    up: Tensor | float = 0.0
    gain: Tensor | float = 0.0
    cost: Tensor | float = 0.0

    def of(self, q: Tensor, p: Tensor) -> Tensor:
        """What is left [..., V] float64; coefficients have one dimension less."""
        weight, minus, up, gain, cost = (
            x.unsqueeze(-1) if isinstance(x, Tensor) else x for x in (getattr(self, f.name) for f in fields(self))
        )
        q, p = q.double(), p.double()
        left = q * weight - p * minus
        if isinstance(up, Tensor) or up:
            left = left - (q * gain - p * cost).clamp_(min=0.0).minimum(p).mul_(up)
        return left.clamp_(min=0.0)

    def masses(self, q_BNV: Tensor, p_BMV: Tensor, like_BR: Tensor, rows_BR: Tensor | None = None) -> Tensor:
        """The sum of what is left at the nodes `rows` (without them the first R) [B, R], of the shape of `like`."""
        if q_BNV.is_cuda:
            from eval import kernels

            parts = [getattr(self, f.name) for f in fields(self)]
            filled = [x.expand_as(like_BR) if isinstance(x, Tensor) else torch.full_like(like_BR, x) for x in parts]
            return kernels.masses(q_BNV, p_BMV, rows_BR, torch.stack(filled, 2).unsqueeze(2)).squeeze(2)
        if rows_BR is None:
            R = like_BR.shape[1]
            return self.of(q_BNV[:, :R], p_BMV[:, :R]).sum(2)
        index = rows_BR.unsqueeze(2).expand(-1, -1, q_BNV.shape[2])
        return self.of(q_BNV.gather(1, index), p_BMV.gather(1, index)).sum(2)
