"""The diagonals of an unroll's attention: each slot's own key of every later step, beside its causal part.

One softmax over both parts, by their log-sum-exp. Query heads that share a key head are an axis G of their own.
N query heads, K key-value heads, n slots, D head size, I diagonals.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from models.kernels import HEAD_SIZES


def stacked(parts_KnD: Sequence[Tensor]) -> Tensor:
    """[I, K, n, D]. A slot's heads lie side by side, as the layers lay them: turned around, copies take five times as
    long."""
    return torch.stack([part.transpose(0, 1) for part in parts_KnD]).transpose(1, 2)


def merge(
    q_NnD: Tensor, out_NnD: Tensor, lse_Nn: Tensor, keys_IKnD: Tensor, values_IKnD: Tensor
) -> tuple[Tensor, Tensor]:
    """The causal part's output and log-sum-exp with the diagonals taken in."""
    if q_NnD.is_cuda and q_NnD.shape[-1] in HEAD_SIZES:
        from models import fused_train

        return fused_train.merge(q_NnD, out_NnD, lse_Nn, keys_IKnD, values_IKnD)
    wide, split = torch.promote_types(q_NnD.dtype, torch.float32), (keys_IKnD.shape[1], -1)
    keys, values = keys_IKnD.unsqueeze(2), values_IKnD.unsqueeze(2)
    scores = (q_NnD.unflatten(0, split).to(wide) * keys).sum(-1) * q_NnD.shape[-1] ** -0.5  # [I, K, G, n]
    causal = lse_Nn.to(wide).unflatten(0, split)
    total = torch.logaddexp(causal, scores.logsumexp(0))
    own = ((scores - total).exp().unsqueeze(-1) * values).sum(0)
    out = out_NnD.unflatten(0, split) * (causal - total).exp().unsqueeze(-1) + own
    return out.to(q_NnD.dtype).flatten(0, 1), total.to(lse_Nn.dtype).flatten(0, 1)


def gradients(
    grad_NnD: Tensor, q_NnD: Tensor, out_NnD: Tensor, lse_Nn: Tensor, keys_IKnD: Tensor, values_IKnD: Tensor, dq: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, with the causal part's `dq` in it, of the keys and of the values; `out` and `lse` are merged."""
    if q_NnD.is_cuda and q_NnD.shape[-1] in HEAD_SIZES:
        from models import fused_train

        return fused_train.gradients(grad_NnD, q_NnD, out_NnD, lse_Nn, keys_IKnD, values_IKnD, dq)
    wide, split = torch.promote_types(q_NnD.dtype, torch.float32), (keys_IKnD.shape[1], -1)
    scale, keys, values = q_NnD.shape[-1] ** -0.5, keys_IKnD.unsqueeze(2), values_IKnD.unsqueeze(2)
    q, grad = q_NnD.to(wide).unflatten(0, split), grad_NnD.to(wide).unflatten(0, split)  # [K, G, n, D]
    weight = ((q * keys).sum(-1) * scale - lse_Nn.unflatten(0, split)).exp()  # [I, K, G, n]
    dscore = weight * ((grad * values).sum(-1) - (grad * out_NnD.unflatten(0, split)).sum(-1)) * scale
    dq = (dq + (dscore.unsqueeze(-1) * keys).sum(0).flatten(0, 1)).to(q_NnD.dtype)
    dkeys = (dscore.unsqueeze(-1) * q).sum(2).to(q_NnD.dtype)
    return dq, dkeys, (weight.unsqueeze(-1) * grad).sum(2).to(q_NnD.dtype)
