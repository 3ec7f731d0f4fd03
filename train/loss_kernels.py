"""What train/losses.py asks of logits, as kernels for a GPU (Triton).

One program a slot. `judge` reads its logits two or three times and writes the gradient over them; both rows of logits
stay in the cache from one reading to the next.

n slots, V kept vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from train.losses import TINY, Judged, Loss

BLOCK = 4096


@triton.jit(do_not_specialize=["lk_scale", "lk_decay"])
def _judge(
    logits, teacher, rows, lse, scale, losses, guesses, overlaps, V, lk_scale, lk_decay, tiny,
    NAME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    row = tl.load(rows + slot)
    z_row, t_row = logits + slot * V, teacher + row * V
    # running maxima; each lane's masses, sums of (teacher's mass) x (draft's, teacher's logit), and best of its draft's
    z_most, t_most = float("-inf"), float("-inf")
    z_masses, t_masses = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    crossing, owning = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    best, best_at = tl.full([BLOCK], float("-inf"), tl.float32), at
    for start in range(0, V, BLOCK):
        inside = start + at < V
        z = tl.load(z_row + start + at, mask=inside, other=float("-inf")).to(tl.float32)
        t = tl.load(t_row + start + at, mask=inside, other=float("-inf")).to(tl.float32)
        best_at, best = tl.where(z > best, start + at, best_at), tl.maximum(best, z)
        z_peak, t_peak = tl.maximum(z_most, tl.max(z, 0)), tl.maximum(t_most, tl.max(t, 0))
        z_masses = z_masses * tl.exp(z_most - z_peak) + tl.exp(z - z_peak)
        fade, p = tl.exp(t_most - t_peak), tl.exp(t - t_peak)
        t_masses = t_masses * fade + p
        crossing = crossing * fade + tl.where(inside, p * z, 0.0)
        if NAME != "soft_ce":
            owning = owning * fade + tl.where(inside, p * t, 0.0)
        z_most, t_most = z_peak, t_peak
    guess = tl.min(tl.where(best == z_most, best_at, V - 1), 0)
    t_mass = tl.sum(t_masses, 0)
    z_lse, t_lse = z_most + tl.log(tl.sum(z_masses, 0)), t_most + tl.log(t_mass)
    t_full = tl.load(lse + row).to(tl.float32)
    loss = z_lse - tl.sum(crossing, 0) / t_mass
    if NAME != "soft_ce":
        loss -= t_lse - tl.sum(owning, 0) / t_mass
    weight, overlap, won = tl.load(scale + slot).to(tl.float32), 0.0, 0.0
    a, b = weight, 0.0
    if NAME == "lk_alpha" or NAME == "lk_lambda":
        for start in range(0, V, BLOCK):
            inside = start + at < V
            q = tl.exp(tl.load(z_row + start + at, mask=inside, other=float("-inf")).to(tl.float32) - z_lse)
            full = tl.exp(tl.load(t_row + start + at, mask=inside, other=float("-inf")).to(tl.float32) - t_full)
            overlap += tl.sum(tl.minimum(q, full), 0)
            won += tl.sum(tl.where(q < full, q, 0.0), 0)
        if NAME == "lk_alpha":
            safe = tl.maximum(overlap, tiny)
            loss, a, b = -tl.log(safe), 0.0, -weight / safe
        else:
            share = lk_scale * tl.exp(-lk_decay * overlap)
            loss = share * loss + (1.0 - share) * (1.0 - overlap)
            a, b = share * weight, (share - 1.0) * weight
    shared, kept_mass = tl.zeros([BLOCK], tl.float32), tl.exp(t_lse - t_full)
    for start in range(0, V, BLOCK):
        inside = start + at < V
        q = tl.exp(tl.load(z_row + start + at, mask=inside, other=float("-inf")).to(tl.float32) - z_lse)
        p = tl.exp(tl.load(t_row + start + at, mask=inside, other=float("-inf")).to(tl.float32) - t_lse)
        full = p * kept_mass
        shared += tl.minimum(q, full)
        gradient = a * (q - p)
        if NAME == "lk_alpha" or NAME == "lk_lambda":
            gradient += b * q * (tl.where(q < full, 1.0, 0.0) - won)
        tl.store(z_row + start + at, gradient.to(logits.dtype.element_ty), mask=inside)
    tl.store(losses + slot, loss)
    tl.store(guesses + slot, guess)
    tl.store(overlaps + slot, tl.sum(shared, 0))


def judge(logits_nV: Tensor, teacher_cV: Tensor, rows_n: Tensor, lse_c: Tensor, scale_n: Tensor, loss: Loss) -> Judged:
    """As train.losses.judge."""
    n, V = logits_nV.shape
    value_n, overlap_n = (torch.empty(n, dtype=torch.float32, device=logits_nV.device) for _ in range(2))
    guess_n = torch.empty(n, dtype=torch.int64, device=logits_nV.device)
    block = min(BLOCK, triton.next_power_of_2(V))
    _judge[(n,)](
        logits_nV, teacher_cV.contiguous(), rows_n, lse_c, scale_n, value_n, guess_n, overlap_n, V,
        loss.lk_scale, loss.lk_decay, TINY, loss.name, block, num_warps=max(1, min(8, block // 256)),
    )  # fmt: skip
    return Judged(value_n, guess_n, overlap_n)
