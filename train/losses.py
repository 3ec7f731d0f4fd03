"""What a slot's draft law q is asked to be, given the target's law p: losses and their gradients in the draft's logits.

With A = sum_v min(p_v, q_v), the chance that a draft drawn from q is accepted (arXiv 2211.17192), and s = the sum of
q_v over the tokens with q_v < p_v, every gradient has the form a (q - p) + b q (1[q < p] - s):

    soft_ce    -sum p log q                           a = 1, b = 0
    kl         sum p log (p / q)                      a = 1, b = 0
    lk_alpha   -log A                                 a = 0, b = -1 / A
    lk_lambda  w KL + (1 - w) (1 - A)                 a = w, b = -(1 - w);  w = lk_scale exp(-lk_decay A), held constant

(LK: arXiv 2602.23881.) In the cross-entropy and in KL, p is the target's law over the kept vocabulary, renormalised; in
A it is that over its full vocabulary, since a draft can win no more than the mass that p gives to kept tokens.
n slots, c rows of the teacher, V kept vocabulary.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

TINY = 1e-30


@dataclass(frozen=True)
class Loss:
    name: str = "soft_ce"  # recipes.schema.OBJECTIVES
    lk_scale: float = 1.0
    lk_decay: float = 1.0


class Judged(NamedTuple):
    """Of each slot."""

    loss_n: Tensor
    guess_n: Tensor  # the draft's arg-max
    overlap_n: Tensor  # A


def judge(logits_nV: Tensor, teacher_cV: Tensor, rows_n: Tensor, lse_c: Tensor, scale_n: Tensor, loss: Loss) -> Judged:
    """Judge draft logits against rows of the teacher's, and write `scale` times the gradient over the logits.

    `lse`: log-sum-exp of the teacher's logits over its full vocabulary.
    """
    if logits_nV.is_cuda and logits_nV.dtype != torch.float64:
        from train import loss_kernels

        return loss_kernels.judge(logits_nV, teacher_cV, rows_n, lse_c, scale_n, loss)
    return plainly(logits_nV, teacher_cV, rows_n, lse_c, scale_n, loss)


def plainly(
    logits_nV: Tensor, teacher_cV: Tensor, rows_n: Tensor, lse_c: Tensor, scale_n: Tensor, loss: Loss
) -> Judged:
    """`judge` in plain torch."""
    wide = torch.promote_types(logits_nV.dtype, torch.float32)
    teacher = teacher_cV.to(wide)
    log_p = teacher.log_softmax(-1)
    p = log_p.exp()
    mass_c = (teacher.logsumexp(-1) - lse_c).exp()  # of the kept tokens
    entropy_c = -(p * log_p).sum(-1)
    guess_n = logits_nV.argmax(-1)
    log_q = logits_nV.to(wide).log_softmax(-1)
    p_nV = p[rows_n]
    cross_n = -torch.linalg.vecdot(p_nV, log_q)
    q = log_q.exp_()
    full_nV = p_nV * mass_c[rows_n, None]
    overlap_n = torch.minimum(full_nV, q).sum(-1)
    kl_n = cross_n - entropy_c[rows_n]
    if loss.name in ("soft_ce", "kl"):
        logits_nV.copy_(q.sub_(p_nV).mul_(scale_n[:, None]))
        return Judged(cross_n if loss.name == "soft_ce" else kl_n, guess_n, overlap_n)
    value_n, a_n, b_n = lk(loss, kl_n, overlap_n)
    won = q * (q < full_nV)
    won -= q * won.sum(-1, keepdim=True)
    gradient = (q - p_nV).mul_((a_n * scale_n)[:, None]).add_(won.mul_((b_n * scale_n)[:, None]))
    logits_nV.copy_(gradient)
    return Judged(value_n, guess_n, overlap_n)


def lk(loss: Loss, kl_n: Tensor, overlap_n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """An LK loss, and a and b of its gradient."""
    if loss.name == "lk_alpha":
        safe = overlap_n.clamp(min=TINY)
        return -safe.log(), torch.zeros_like(safe), -1 / safe
    weight = loss.lk_scale * torch.exp(-loss.lk_decay * overlap_n)
    return weight * kl_n + (1 - weight) * (1 - overlap_n), weight, weight - 1
