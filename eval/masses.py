"""What two laws leave of each other, and its sum over the vocabulary: all that the rules ask of whole laws.

A *mix* is a few numbers a node, float64: of a target q beside a draft p, (weight q - minus p)+ with two columns; with
five (weight q - minus p - up share)+, where the share min(p, (gain q - cost p)+) is a part of p.
B rows, R nodes of each, N and M as in eval.verify.Drafts, V vocabulary, C columns.
"""

import torch
from torch import Tensor


def mix(weight: Tensor, minus: Tensor, *share: Tensor) -> Tensor:
    """[..., C]; `share` is up, gain and cost."""
    return torch.stack([weight, minus, *share], -1)


def left(q: Tensor, p: Tensor, mix_C: Tensor) -> Tensor:
    """What is left of laws [..., V], float64; the mix has [..., C]."""
    q, p, columns = q.double(), p.double(), mix_C.unsqueeze(-2).unbind(-1)
    found = q * columns[0] - p * columns[1]
    if len(columns) > 2:
        up, gain, cost = columns[2:]
        found -= (q * gain - p * cost).clamp_(min=0.0).minimum(p).mul_(up)
    return found.clamp_(min=0.0)


def masses(q_BNV: Tensor, p_BMV: Tensor, mix_BRC: Tensor, rows_BR: Tensor | None = None) -> Tensor:
    """The sum of what is left at the nodes `rows`, or at the first R of them [B, R]."""
    if q_BNV.is_cuda:
        from eval import kernels

        return kernels.parts(q_BNV, p_BMV, mix_BRC, rows_BR).sum(2)
    if rows_BR is None:
        R = mix_BRC.shape[1]
        return left(q_BNV[:, :R], p_BMV[:, :R], mix_BRC).sum(2)
    index = rows_BR.unsqueeze(2).expand(-1, -1, q_BNV.shape[2])
    return left(q_BNV.gather(1, index), p_BMV.gather(1, index), mix_BRC).sum(2)
