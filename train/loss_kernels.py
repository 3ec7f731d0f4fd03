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
    # running maxima, masses, sums of (teacher's mass) x (draft's, teacher's logit), and the draft's arg-max
    z_most, t_most = float("-inf"), float("-inf")
    z_mass, t_mass, crossed, own = 0.0, 0.0, 0.0, 0.0
    guess = slot * 0
    for start in range(0, V, BLOCK):
        inside = start + at < V
        z = tl.load(z_row + start + at, mask=inside, other=float("-inf")).to(tl.float32)
        t = tl.load(t_row + start + at, mask=inside, other=float("-inf")).to(tl.float32)
        z_here, t_here = tl.max(z, 0), tl.maximum(t_most, tl.max(t, 0))
        guess = tl.where(z_here > z_most, start + tl.argmax(z, 0).to(tl.int64), guess)
        z_peak = tl.maximum(z_most, z_here)
        z_mass = z_mass * tl.exp(z_most - z_peak) + tl.sum(tl.exp(z - z_peak), 0)
        fade, p = tl.exp(t_most - t_here), tl.exp(t - t_here)
        t_mass = t_mass * fade + tl.sum(p, 0)
        crossed = crossed * fade + tl.sum(tl.where(inside, p * z, 0.0), 0)
        own = own * fade + tl.sum(tl.where(inside, p * t, 0.0), 0)
        z_most, t_most = z_peak, t_here
    z_lse, t_lse, t_full = z_most + tl.log(z_mass), t_most + tl.log(t_mass), tl.load(lse + row).to(tl.float32)
    loss = z_lse - crossed / t_mass
    if NAME != "soft_ce":
        loss -= t_lse - own / t_mass
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
        overlap = 0.0
    for start in range(0, V, BLOCK):
        inside = start + at < V
        q = tl.exp(tl.load(z_row + start + at, mask=inside, other=float("-inf")).to(tl.float32) - z_lse)
        t = tl.load(t_row + start + at, mask=inside, other=float("-inf")).to(tl.float32)
        full = tl.exp(t - t_full)
        overlap += tl.sum(tl.minimum(q, full), 0)
        gradient = a * (q - tl.exp(t - t_lse))
        if NAME == "lk_alpha" or NAME == "lk_lambda":
            gradient += b * q * (tl.where(q < full, 1.0, 0.0) - won)
        tl.store(z_row + start + at, gradient.to(logits.dtype.element_ty), mask=inside)
    tl.store(losses + slot, loss)
    tl.store(guesses + slot, guess)
    tl.store(overlaps + slot, overlap)


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
