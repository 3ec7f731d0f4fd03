"""Kernels for a GPU (Triton): the elementwise parts of a trained layer, forward and backward.

models/lean.py and models/diagonals.py say in plain torch what each computes. N query heads, K key-value heads,
G = N / K, D head size, T slots, I diagonals.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 528  # four a multiprocessor of an H100: each sums the gain's gradient over its rows
FREE = 16  # times as many where nothing is summed over rows
BLOCK = 1024


@triton.jit
def _norm(x, gain, out, size, eps, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = at < size
    wide = tl.load(x + row * size + at, mask=inside, other=0.0).to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    scaled = wide * tl.load(gain + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + at, scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _norm_back(
    grad, x, gain, dx, dgains, rows, size, eps, OF_X: tl.constexpr, OF_GAIN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    inside = at < size
    scale = tl.load(gain + at, mask=inside, other=0.0).to(tl.float32)
    dgain = tl.zeros([BLOCK], tl.float32)
    each = tl.cdiv(rows, tl.num_programs(0))
    first = tl.program_id(0).to(tl.int64) * each
    for i in range(each):
        row, real = first + i, inside & (first + i < rows)
        wide = tl.load(x + row * size + at, mask=real, other=0.0).to(tl.float32)
        g = tl.load(grad + row * size + at, mask=real, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
        normed, scaled = wide * inverse, g * scale
        if OF_GAIN:
            dgain += g * normed
        if OF_X:
            back = inverse * (scaled - normed * (tl.sum(scaled * normed, 0) / size))
            tl.store(dx + row * size + at, back.to(dx.dtype.element_ty), mask=real)
    if OF_GAIN:
        tl.store(dgains + tl.program_id(0) * size + at, dgain, mask=inside)


@triton.jit
def _gated(gate, up, out, total, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gated_back(grad, gate, up, dgate, dup, total, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    d = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(g)
    tl.store(dgate + at, (d * u * share * (1.0 + g * (1.0 - share))).to(dgate.dtype.element_ty), mask=inside)
    tl.store(dup + at, (d * g * share).to(dup.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(x, cos, sin, out, heads, x_head, x_slot, out_head, out_slot, sign, D: tl.constexpr, HEADS: tl.constexpr):
    slot, n, d = tl.program_id(0).to(tl.int64), tl.arange(0, HEADS), tl.arange(0, D)
    partner = (d + D // 2) % D
    inside = (n < heads)[:, None]
    from_here = x + slot * x_slot + n[:, None] * x_head
    value = tl.load(from_here + d[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(from_here + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.where((d < D // 2)[None, :], -other, other)
    c, s = tl.load(cos + slot * D + d).to(tl.float32), tl.load(sin + slot * D + d).to(tl.float32) * sign
    turned = value * c[None, :] + other * s[None, :]
    to_there = out + slot * out_slot + n[:, None] * out_head + d[None, :]
    tl.store(to_there, turned.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["diagonals"])
def _merge(
    q, causal, lse, keys, values, out, total, scale, T, diagonals, q_head, q_slot, c_head, c_slot, out_head, out_slot,
    K: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    slot, k, g, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, HEADS), tl.arange(0, D)
    n, inside = k * G + g, g < G
    both = inside[:, None]
    query = tl.load(q + n[:, None] * q_head + slot * q_slot + d[None, :], mask=both, other=0.0).to(tl.float32)
    mixed = tl.load(causal + n[:, None] * c_head + slot * c_slot + d[None, :], mask=both, other=0.0).to(tl.float32)
    most = tl.load(lse + n.to(tl.int64) * T + slot, mask=inside, other=0.0)
    mass = tl.full([HEADS], 1.0, tl.float32)
    for i in range(diagonals):
        own = ((i * T + slot) * K + k) * D + d
        score = tl.sum(query * tl.load(keys + own).to(tl.float32)[None, :], 1) * scale
        peak = tl.maximum(most, score)
        fade, share = tl.exp(most - peak), tl.exp(score - peak)
        mixed = mixed * fade[:, None] + share[:, None] * tl.load(values + own).to(tl.float32)[None, :]
        mass, most = mass * fade + share, peak
    mixed = mixed / mass[:, None]
    tl.store(out + n[:, None] * out_head + slot * out_slot + d[None, :], mixed.to(out.dtype.element_ty), mask=both)
    tl.store(total + n.to(tl.int64) * T + slot, most + tl.log(mass), mask=inside)


@triton.jit(do_not_specialize=["diagonals"])
def _merge_back(
    grad, q, out, lse, keys, values, causal, dq, dkeys, dvalues, scale, T, diagonals,
    grad_head, grad_slot, q_head, q_slot, out_head, out_slot, c_head, c_slot, dq_head, dq_slot,
    K: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    slot, k, g, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, HEADS), tl.arange(0, D)
    n, inside = k * G + g, g < G
    both = inside[:, None]
    head, across = n[:, None], d[None, :]
    da = tl.load(grad + head * grad_head + slot * grad_slot + across, mask=both, other=0.0).to(tl.float32)
    query = tl.load(q + head * q_head + slot * q_slot + across, mask=both, other=0.0).to(tl.float32)
    mixed = tl.load(out + head * out_head + slot * out_slot + across, mask=both, other=0.0).to(tl.float32)
    back = tl.load(causal + head * c_head + slot * c_slot + across, mask=both, other=0.0).to(tl.float32)
    total = tl.load(lse + n.to(tl.int64) * T + slot, mask=inside, other=0.0)
    whole = tl.sum(da * mixed, 1)
    for i in range(diagonals):
        own = ((i * T + slot) * K + k) * D + d
        key, value = tl.load(keys + own).to(tl.float32), tl.load(values + own).to(tl.float32)
        weight = tl.exp(tl.sum(query * key[None, :], 1) * scale - total)
        weight = tl.where(inside, weight, 0.0)
        dscore = weight * (tl.sum(da * value[None, :], 1) - whole) * scale
        back += dscore[:, None] * key[None, :]
        tl.store(dkeys + own, tl.sum(dscore[:, None] * query, 0).to(dkeys.dtype.element_ty))
        tl.store(dvalues + own, tl.sum(weight[:, None] * da, 0).to(dvalues.dtype.element_ty))
    tl.store(dq + head * dq_head + slot * dq_slot + across, back.to(dq.dtype.element_ty), mask=both)


def norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis."""
    x, size = x.contiguous(), x.shape[-1]
    out, block = torch.empty_like(x), triton.next_power_of_2(size)
    _norm[(x.numel() // size,)](x, gain, out, size, eps, block, num_warps=max(1, min(16, block // 512)))
    return out


def norm_gradients(
    grad: Tensor, x: Tensor, gain: Tensor, eps: float, wanted: tuple[bool, bool] = (True, True)
) -> tuple[Tensor | None, Tensor | None]:
    """Of x and of the gain, where these are `wanted`."""
    grad, x, size = grad.contiguous(), x.contiguous(), x.shape[-1]
    rows, block = x.numel() // size, triton.next_power_of_2(size)
    programs = min(rows, PROGRAMS if wanted[1] else FREE * PROGRAMS)
    dx = torch.empty_like(x)
    dgains = torch.empty(programs if wanted[1] else 1, size, dtype=torch.float32, device=x.device)
    warps = max(1, min(16, block // 512))
    _norm_back[(programs,)](grad, x, gain, dx, dgains, rows, size, eps, *wanted, block, num_warps=warps)
    return dx if wanted[0] else None, dgains.sum(0).to(gain.dtype) if wanted[1] else None


def gated(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    _gated[(triton.cdiv(out.numel(), BLOCK),)](gate, up, out, out.numel(), BLOCK, num_warps=4)
    return out


def gated_gradients(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    _gated_back[(triton.cdiv(gate.numel(), BLOCK),)](grad, gate, up, dgate, dup, gate.numel(), BLOCK, num_warps=4)
    return dgate, dup


def rotate(x_NTD: Tensor, cos_TD: Tensor, sin_TD: Tensor, sign: int) -> Tensor:
    """By the angle, or against it where `sign` is -1."""
    x = _rows_whole(x_NTD)
    N, T, D = x.shape
    out = torch.empty_like(x)
    _rotate[(T,)](
        x, cos_TD.contiguous(), sin_TD.contiguous(), out, N, x.stride(0), x.stride(1), out.stride(0), out.stride(1),
        float(sign), D, triton.next_power_of_2(N), num_warps=4,
    )  # fmt: skip
    return out


def merge(q_NTD: Tensor, out_NTD: Tensor, lse_NT: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """As models.diagonals.merge; keys and values [I, K, T, D], a slot's heads side by side."""
    q, causal, keys, values = _rows_whole(q_NTD), _rows_whole(out_NTD), _slots_whole(keys), _slots_whole(values)
    (N, T, D), (count, _, K) = q.shape, keys.shape[:3]
    out, total = torch.empty_like(causal), torch.empty(N, T, dtype=torch.float32, device=q.device)
    _merge[(T, K)](
        q, causal, lse_NT.contiguous(), keys, values, out, total, D**-0.5, T, count,
        *q.stride()[:2], *causal.stride()[:2], *out.stride()[:2],
        K, N // K, triton.next_power_of_2(N // K), D, num_warps=1,
    )  # fmt: skip
    return out, total


def gradients(
    grad_NTD: Tensor, q_NTD: Tensor, out_NTD: Tensor, lse_NT: Tensor, keys: Tensor, values: Tensor, dq_NTD: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As models.diagonals.gradients."""
    grad, q, out, causal = (_rows_whole(t) for t in (grad_NTD, q_NTD, out_NTD, dq_NTD))
    keys, values = _slots_whole(keys), _slots_whole(values)
    (N, T, D), (count, _, K) = q.shape, keys.shape[:3]
    dq, dkeys, dvalues = torch.empty_like(causal), torch.empty_like(keys), torch.empty_like(values)
    strides = [s for t in (grad, q, out, causal, dq) for s in t.stride()[:2]]
    _merge_back[(T, K)](
        grad, q, out, lse_NT.contiguous(), keys, values, causal, dq, dkeys, dvalues, D**-0.5, T, count, *strides,
        K, N // K, triton.next_power_of_2(N // K), D, num_warps=1,
    )  # fmt: skip
    return dq, dkeys.transpose(1, 2), dvalues.transpose(1, 2)


def _slots_whole(x_IKTD: Tensor) -> Tensor:
    """[I, T, K, D], which is how models.diagonals.stacked lays them."""
    return x_IKTD.transpose(1, 2).contiguous()


def _rows_whole(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
