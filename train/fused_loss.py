"""The drafter's head and the loss behind it in one pass over chunks of slots: no logits outlive a chunk.

What a slot weighs is known before the forward, so the gradients of the head and of its input are made beside the loss,
while the chunk's logits are there, and the backward only hands them on. Slots are sorted by the teacher's row, so that
of the teacher's logits too no more than a chunk exists, and each row is made about once for all unroll steps.
n slots, m rows of the teacher, H hidden, V kept vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from train.losses import Judged, Loss, judge

CHUNK_GPU = 2**28  # logits of a chunk: wide products, 0.5 GiB in bf16
CHUNK_CPU = 2**22  # about what its caches hold


@dataclass(frozen=True)
class Teaching:
    """What the slots are judged by."""

    logits: Callable[[slice], Tensor]  # of some of the m rows, [.., V]
    lse_m: Tensor  # over the full vocabulary
    order_n: Tensor  # where each slot stands in the head's input; what follows is in this order
    rows_n: Tensor  # the row of each slot, ascending
    rows_on_host: np.ndarray
    scale_n: Tensor  # what each slot weighs in the loss
    loss: Loss
    dtype: torch.dtype  # of the products


def fused_loss(x_nH: Tensor, weight_VH: Tensor, teaching: Teaching) -> tuple[Tensor, Judged]:
    """The sum of the slots' losses, each times its weight; and what was found of each, in the teaching's order."""
    total, *judged = _FusedLoss.apply(x_nH, weight_VH, teaching)
    return total, Judged(*judged)


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_nH: Tensor, weight_VH: Tensor, teaching: Teaching) -> tuple[Tensor, ...]:
        with torch.autocast(x_nH.device.type, enabled=False):
            x, weight = x_nH.to(teaching.dtype), weight_VH.to(teaching.dtype)
            dx = torch.empty_like(x)
            # over the chunks in fp32, by the product itself on a GPU; a CPU rounds each chunk's once
            dweight = torch.zeros_like(weight, dtype=torch.promote_types(weight_VH.dtype, torch.float32))
            size = max(1, (CHUNK_GPU if x.is_cuda else CHUNK_CPU) // len(weight))
            found = []
            for start in range(0, len(x), size):
                part = slice(start, start + size)
                here = teaching.rows_on_host[part]
                first = int(here[0])
                rows = slice(first, int(here[-1]) + 1)
                order = teaching.order_n[part]
                x_part = x.index_select(0, order)
                logits = x_part @ weight.T
                weigh = (teaching.rows_n[part] - first, teaching.lse_m[rows], teaching.scale_n[part], teaching.loss)
                found.append(judge(logits, teaching.logits(rows), *weigh))
                dx.index_copy_(0, order, logits @ weight)
                if dweight.dtype == logits.dtype:
                    dweight.addmm_(logits.T, x_part)
                elif x.is_cuda:
                    torch.addmm(dweight, logits.T, x_part, out_dtype=dweight.dtype, out=dweight)
                else:
                    dweight += logits.T @ x_part
            judged = Judged(*(torch.cat(of_all) for of_all in zip(*found, strict=True)))
        ctx.gradients = dx.to(x_nH.dtype), dweight.to(weight_VH.dtype)
        ctx.mark_non_differentiable(*judged)
        return (judged.loss_n * teaching.scale_n).sum(), *judged

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        if ctx.gradients is None:
            raise RuntimeError("the fused loss goes backward once: its gradients are made in the forward")
        (dx, dweight), ctx.gradients = ctx.gradients, None
        return dx.mul_(gradients[0]), dweight.mul_(gradients[0]), None
