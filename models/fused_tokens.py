"""Decoding kernels for a GPU (Triton): the likeliest tokens of logits, and draws from them, in a launch or two each.

The plain functions are the references: those of the same names in `models.sampling`.

B rows, V vocabulary.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _top_of_chunk(logits, values, indices, peaks, masses, V, chunks, k: tl.constexpr, BLOCK: tl.constexpr):
    row, chunk = tl.program_id(0), tl.program_id(1)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * V + at, mask=at < V, other=float("-inf")).to(tl.float32)
    peak = tl.max(x, 0)
    tl.store(peaks + row * chunks + chunk, peak)
    tl.store(masses + row * chunks + chunk, tl.sum(tl.exp(x - peak), 0))
    for i in tl.static_range(k):
        value, index = tl.max(x, 0, return_indices=True)  # of equal ones the first
        tl.store(values + (row * chunks + chunk) * k + i, value)
        # among logits that are no numbers none is the largest: an index all the same, of a token
        tl.store(indices + (row * chunks + chunk) * k + i, tl.minimum(chunk * BLOCK + index, V - 1))
        x = tl.where(at == chunk * BLOCK + index, float("-inf"), x)


@triton.jit
def _top_of_chunks(
    values, indices, peaks, masses, best, chosen, total, chunks, k: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, at, c = tl.program_id(0), tl.arange(0, BLOCK), tl.arange(0, CHUNKS)
    peak = tl.load(peaks + row * chunks + c, mask=c < chunks, other=float("-inf"))
    mass = tl.load(masses + row * chunks + c, mask=c < chunks, other=0.0)
    highest = tl.max(peak, 0)
    tl.store(total + row, highest + tl.log(tl.sum(mass * tl.exp(peak - highest), 0)))
    x = tl.load(values + row * chunks * k + at, mask=at < chunks * k, other=float("-inf"))
    for i in tl.static_range(k):
        value, index = tl.max(x, 0, return_indices=True)
        tl.store(best + row * k + i, value)
        tl.store(chosen + row * k + i, tl.load(indices + row * chunks * k + tl.minimum(index, chunks * k - 1)))
        x = tl.where(at == index, float("-inf"), x)


@triton.jit
def _mass_of_chunk(logits, temperatures, peaks, masses, V, chunks, BLOCK: tl.constexpr):
    row, chunk = tl.program_id(0), tl.program_id(1)
    sharpness = 1.0 / tl.load(temperatures + row)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * V + at, mask=at < V, other=float("-inf")).to(tl.float32) * sharpness
    peak = tl.max(x, 0)
    tl.store(peaks + row * chunks + chunk, peak)
    tl.store(masses + row * chunks + chunk, tl.sum(tl.exp(x - tl.where(peak == float("-inf"), 0.0, peak)), 0))


@triton.jit
def _draw_token(
    logits, temperatures, uniforms, peaks, masses, chosen, V, chunks, CHUNKS: tl.constexpr, BLOCK: tl.constexpr
):
    row, c = tl.program_id(0), tl.arange(0, CHUNKS)
    sharpness = 1.0 / tl.load(temperatures + row)
    peak = tl.load(peaks + row * chunks + c, mask=c < chunks, other=float("-inf"))
    highest = tl.max(peak, 0)
    mass = tl.load(masses + row * chunks + c, mask=c < chunks, other=0.0) * tl.exp(peak - highest)
    point = (tl.load(uniforms + row) * tl.sum(mass, 0)).to(tl.float32)
    last = tl.max(tl.where(mass > 0, c, 0), 0)  # rounding can land past the last one that has mass
    chunk = tl.min(tl.where((tl.cumsum(mass, 0) > point) & (mass > 0), c, last), 0)
    before = tl.sum(tl.where(c < chunk, mass, 0.0), 0)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * V + at, mask=at < V, other=float("-inf")).to(tl.float32) * sharpness
    p = tl.exp(x - highest)
    last = tl.max(tl.where(p > 0, at, 0), 0)
    tl.store(chosen + row, tl.min(tl.where((before + tl.cumsum(p, 0) > point) & (p > 0), at, last), 0).to(tl.int64))


def top(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest of each row, their indices (of equal ones the lower first) [..., k], and its log-sum-exp [...]."""
    V, block = logits.shape[-1], 2048
    shape, rows, chunks = logits.shape[:-1], logits.numel() // V, triton.cdiv(V, block)
    wide, index = partial(logits.new_empty, dtype=torch.float32), partial(logits.new_empty, dtype=torch.int64)
    values, indices = wide((rows, chunks, k)), index((rows, chunks, k))
    peaks, masses = wide((rows, chunks)), wide((rows, chunks))
    best, chosen, total = wide((*shape, k)), index((*shape, k)), wide(shape)
    _top_of_chunk[(rows, chunks)](logits, values, indices, peaks, masses, V, chunks, k, block, num_warps=4)
    widths = triton.next_power_of_2(chunks), triton.next_power_of_2(chunks * k)
    _top_of_chunks[(rows,)](values, indices, peaks, masses, best, chosen, total, chunks, k, *widths, num_warps=4)
    return best, chosen, total


@triton.jit
def _sum_of_chunk(laws, sums, V, chunks, BLOCK: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    tl.store(
        sums + row * chunks + chunk, tl.sum(tl.load(laws + row * V + at, mask=at < V, other=0.0).to(tl.float64), 0)
    )


@triton.jit
def _draw_row(laws, rows, sums, uniforms, out, V, R, K, chunks, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    place, c, lane = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNKS), tl.arange(0, BLOCK)
    row = place // K * R + tl.load(rows + place)
    mass = tl.load(sums + row * chunks + c, mask=c < chunks, other=0.0)
    point = tl.load(uniforms + place) * tl.sum(mass, 0)
    last = tl.max(tl.where(mass > 0.0, c, 0), 0)
    chunk = tl.minimum(tl.sum((tl.cumsum(mass, 0) <= point).to(tl.int32), 0), last)
    before = tl.sum(tl.where(c < chunk, mass, 0.0), 0)
    at = chunk * BLOCK + lane
    law = tl.load(laws + row * V + at, mask=at < V, other=0.0).to(tl.float64)
    last = tl.max(tl.where(law > 0.0, lane, 0), 0)
    index = tl.minimum(tl.sum((before + tl.cumsum(law, 0) <= point).to(tl.int32), 0), last)
    tl.store(out + place, (chunk * BLOCK + index).to(tl.int64))


def draw_rows(laws_BRV: Tensor, rows_BK: Tensor, uniforms_BK: Tensor) -> Tensor:
    """`models.sampling.draw_rows`."""
    (B, R, V), K = laws_BRV.shape, rows_BK.shape[1]
    block = 2048
    chunks, laws, uniforms = triton.cdiv(V, block), laws_BRV.contiguous(), uniforms_BK.contiguous()
    sums = torch.empty(B, R, chunks, dtype=torch.float64, device=laws.device)
    out = torch.empty(B, K, dtype=torch.int64, device=laws.device)
    _sum_of_chunk[(B * R, chunks)](laws, sums, V, chunks, block, num_warps=4)
    wide = triton.next_power_of_2(chunks)
    _draw_row[(B * K,)](laws, rows_BK.contiguous(), sums, uniforms, out, V, R, K, chunks, wide, block, num_warps=8)
    return out


@triton.jit(do_not_specialize=["offset"])
def _uniforms(rows, positions, out, offset, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    x = tl.load(rows + at, mask=inside, other=0) * 0x9E3779B97F4A7C1
    x += tl.load(positions + at, mask=inside, other=0) * 0x2545F4914F6CDD1 + offset
    x = (x ^ ((x >> 33) & 0x7FFFFFFF)) * -0xAE502812AA7333
    x = (x ^ ((x >> 33) & 0x7FFFFFFF)) * -0x3B314601E57A13AD
    x = x ^ ((x >> 33) & 0x7FFFFFFF)
    high = ((x >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64)
    tl.store(out + at, (high + 0.5) * (1.0 / 9007199254740992.0), mask=inside)


def uniforms(offset: int, rows: Tensor, positions: Tensor) -> Tensor:
    """`models.sampling.uniforms`: int64 [...] of one shape -> float64 [...]."""
    out = torch.empty(positions.shape, dtype=torch.float64, device=positions.device)
    count, block = out.numel(), 256
    _uniforms[(triton.cdiv(count, block),)](rows.contiguous(), positions.contiguous(), out, offset, count, block)
    return out


def draw(logits: Tensor, uniforms: Tensor, temperature: float | Tensor) -> Tensor:
    """`models.sampling.draw` of the plain law at a temperature, or at one for each row, in fp32: [..., V] logits and
    float64 [...] -> int64 [...]."""
    V, block = logits.shape[-1], 2048
    rows, chunks = logits.numel() // V, triton.cdiv(V, block)
    peaks, masses = (logits.new_empty(rows, chunks, dtype=torch.float32) for _ in range(2))
    if not isinstance(temperature, Tensor):
        temperature = logits.new_full((rows,), temperature, dtype=torch.float32)
    chosen = torch.empty(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    _mass_of_chunk[(rows, chunks)](logits, temperature, peaks, masses, V, chunks, block, num_warps=4)
    _draw_token[(rows,)](
        logits, temperature, uniforms, peaks, masses, chosen, V, chunks, triton.next_power_of_2(chunks), block,
        num_warps=4,
    )  # fmt: skip
    return chosen


@triton.jit
def _best_and_mass(logits, guesses, masses, V, BLOCK: tl.constexpr):
    slot, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    most, mass = float("-inf"), 0.0
    guess = slot * 0
    for start in range(0, V, BLOCK):
        z = tl.load(logits + slot * V + start + at, mask=start + at < V, other=float("-inf")).to(tl.float32)
        here = tl.max(z, 0)
        guess = tl.where(here > most, start + tl.argmax(z, 0).to(tl.int64), guess)
        peak = tl.maximum(most, here)
        mass = mass * tl.exp(most - peak) + tl.sum(tl.exp(z - peak), 0)
        most = peak
    tl.store(guesses + slot, guess)
    tl.store(masses + slot, most + tl.log(mass))


def best_and_mass(logits_nV: Tensor) -> tuple[Tensor, Tensor]:
    """As models.sampling.best_and_mass."""
    n, V = logits_nV.shape
    guess_n = torch.empty(n, dtype=torch.int64, device=logits_nV.device)
    mass_n = torch.empty(n, dtype=torch.float32, device=logits_nV.device)
    block = min(4096, triton.next_power_of_2(V))
    warps = max(1, min(8, block // 256))
    _best_and_mass[(n,)](logits_nV.contiguous(), guess_n, mass_n, V, block, num_warps=warps)
    return guess_n, mass_n
