"""Cross-entropy through a frozen head: logits exist for a chunk of slots at a time; the slots' gradient alone is kept.

n slots, m positions that teach some slot, H hidden, V vocabulary.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from models.sampling import best_and_mass
from models.target import Target
from train.fused_loss import CHUNK_GPU
from train.losses import Loss, judge

CHUNK = 2**25  # logits that exist at once, on a CPU


class Wanted(NamedTuple):
    """What each slot should say; slots are in the order of their teachers, and every position teaches some slot."""

    final_mH: Tensor  # the target's final normed states
    teacher: np.ndarray  # [n], on the host
    teacher_n: Tensor
    next_n: Tensor  # the row's own token
    weight_n: Tensor  # of the slot in the loss
    soft: bool  # against the target's distribution; else against the row's own token


class _Head(torch.autograd.Function):
    """Gradients are made in the forward, while a chunk's logits are there, and scaled in the backward."""

    @staticmethod
    def forward(ctx: Any, target: Target, wanted: Wanted, hidden_nH: Tensor, *added: Tensor) -> tuple[Tensor, ...]:
        """`added` is nothing, or code [n, r], weight [V, r] and bias [V] of logits that are added to the head's."""
        wide = torch.promote_types(hidden_nH.dtype, torch.float32)
        loss_n = torch.empty(len(hidden_nH), dtype=wide, device=hidden_nH.device)
        guess_n, slopes = torch.empty_like(wanted.next_n), [torch.zeros_like(t) for t in (hidden_nH, *added)]
        chunk, learns = CHUNK_GPU if hidden_nH.is_cuda else CHUNK, ctx.needs_input_grad[2]
        size = max(1, chunk // target.vocab_size)
        for start in range(0, len(hidden_nH), size):
            part = slice(start, min(start + size, len(hidden_nH)))
            frozen_cV = logits_cV = target.logits(hidden_nH[part])
            if added:
                code, weight, bias = (t.to(logits_cV.dtype) for t in (added[0][part], *added[1:]))
                logits_cV = torch.addmm(bias, code, weight.T).add_(frozen_cV)
            copied = logits_cV is frozen_cV and target.final_softcap is not None  # whose slope asks for it again
            kept = logits_cV.dtype if wanted.soft and logits_cV.is_cuda else wide  # a GPU's kernel widens as it reads
            slope_cV = logits_cV.to(kept, copy=copied)
            loss_n[part], guess_n[part] = _judge(target, wanted, part, slope_cV)
            if added:
                narrow = slope_cV.to(logits_cV.dtype)
                slopes[1][part] = (narrow @ weight).to(slopes[1].dtype)
                slopes[2] += narrow.T @ code
                slopes[3] += slope_cV.sum(0, dtype=slopes[3].dtype)
            if learns:
                if target.final_softcap is not None:
                    slope_cV.mul_(1 - (frozen_cV.to(wide) / target.final_softcap) ** 2)
                slopes[0][part] = slope_cV.to(hidden_nH.dtype) @ target.head_weight
        ctx.save_for_backward(*slopes)
        ctx.mark_non_differentiable(loss_n, guess_n)
        return (loss_n * wanted.weight_n).sum(), loss_n, guess_n

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        slopes = (slope * gradients[0].to(slope.dtype) for slope in ctx.saved_tensors)
        return None, None, *slopes


def _judge(target: Target, wanted: Wanted, part: slice, logits_cV: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy and arg-max of a chunk's slots [c]; the weighted loss's gradient is written over their logits."""
    if wanted.soft:
        first, last = int(wanted.teacher[part.start]), int(wanted.teacher[part.stop - 1])
        teacher = target.logits(wanted.final_mH[first : last + 1])
        lse = best_and_mass(teacher)[1]
        judged = judge(logits_cV, teacher, wanted.teacher_n[part] - first, lse, wanted.weight_n[part], Loss())
        return judged.loss_n, judged.guess_n
    log_q, following = logits_cV.log_softmax(-1), wanted.next_n[part].unsqueeze(1)
    guess_c, loss_c = log_q.argmax(-1), -log_q.gather(1, following).squeeze(1)
    torch.exp(log_q, out=logits_cV)
    logits_cV.scatter_add_(1, following, logits_cV.new_full((len(logits_cV), 1), -1.0))
    logits_cV.mul_(wanted.weight_n[part].unsqueeze(1))
    return loss_c, guess_c


def head_loss(target: Target, wanted: Wanted, hidden_nH: Tensor, *added: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(the weighted sum [], each slot's cross-entropy [n], each slot's arg-max [n]) of final normed states under the
    target's head, which is frozen. `added`: code [n, r], weight [V, r] and bias [V] of learned logits besides."""
    loss, loss_n, guess_n = _Head.apply(target, wanted, hidden_nH, *added)
    return loss, loss_n, guess_n
