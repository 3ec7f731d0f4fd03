"""Cross-entropy through a frozen head: logits exist for a chunk of slots at a time; the slots' gradient alone is kept.

n slots, m positions that teach some slot, H hidden, V vocabulary.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.target import Target
from train.features import CHUNK


class Wanted(NamedTuple):
    """What each slot should say; slots are in the order of their teachers, and every position teaches some slot."""

    final_mH: Tensor  # the target's final normed states
    teacher: list[int]  # [n], on the host
    teacher_n: Tensor
    next_n: Tensor  # the row's own token
    weight_n: Tensor  # of the slot in the loss
    soft: bool  # against the target's distribution; else against the row's own token


class _FrozenHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_nH: Tensor, target: Target, wanted: Wanted) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(hidden_nH.dtype, torch.float32)
        loss_n = torch.empty(len(hidden_nH), dtype=wide, device=hidden_nH.device)
        guess_n, gradient_nH = torch.empty_like(wanted.next_n), torch.empty_like(hidden_nH)
        size = max(1, CHUNK // target.vocab_size)
        for start in range(0, len(hidden_nH), size):
            part = slice(start, min(start + size, len(hidden_nH)))
            logits_cV = target.logits(hidden_nH[part])
            log_q = logits_cV.to(wide).log_softmax(-1)
            guess_n[part] = log_q.argmax(-1)
            if wanted.soft:
                first, last = wanted.teacher[part.start], wanted.teacher[part.stop - 1]
                p = target.logits(wanted.final_mH[first : last + 1]).to(wide).softmax(-1)
                p = p.index_select(0, wanted.teacher_n[part] - first)
                loss_n[part] = -(p * log_q).sum(-1)
                slope = log_q.exp_().sub_(p)
            else:
                following = wanted.next_n[part].unsqueeze(1)
                loss_n[part] = -log_q.gather(1, following).squeeze(1)
                slope = log_q.exp_()
                slope.scatter_add_(1, following, slope.new_full((len(slope), 1), -1.0))
            if target.final_softcap is not None:
                slope.mul_(1 - (logits_cV.to(wide) / target.final_softcap) ** 2)
            gradient_nH[part] = (slope * wanted.weight_n[part].unsqueeze(1)).to(hidden_nH.dtype) @ target.head_weight
        ctx.save_for_backward(gradient_nH)
        ctx.mark_non_differentiable(loss_n, guess_n)
        return (loss_n * wanted.weight_n).sum(), loss_n, guess_n

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient_nH,) = ctx.saved_tensors
        return gradient_nH * gradients[0].to(gradient_nH.dtype), None, None


def frozen_head_loss(hidden_nH: Tensor, target: Target, wanted: Wanted) -> tuple[Tensor, Tensor, Tensor]:
    """(the weighted sum [], each slot's cross-entropy [n], each slot's arg-max [n]) of final normed states."""
    loss, loss_n, guess_n = _FrozenHead.apply(hidden_nH, target, wanted)
    return loss, loss_n, guess_n
