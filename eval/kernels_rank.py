"""Kernels of multi-path block verification (eval.rules_chain.multipath), for a GPU.

B rows, L drafted tokens, V vocabulary; S = B L rows of laws, whose tokens `order` [S, V] ranks, the lowest first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eval.kernels import BLOCK, FLOOR, _multiply


@triton.jit
def _ranked_sums(order, draft, nodes, tokens, sums, seats, V, P, L, chunks, BLOCK: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(order + row * V + at, mask=at < V, other=0) - row * V
    base = draft + ((row // L) * P + tl.load(nodes + row)) * V
    p = tl.load(base + token, mask=at < V, other=0.0).to(tl.float64)
    tl.store(sums + row * chunks + chunk, tl.sum(p, 0))
    tl.store(seats + row + at * 0, at.to(tl.int64), mask=(at < V) & (token == tl.load(tokens + row)))


@triton.jit
def _below(order, draft, nodes, sums, seats, below, V, P, L, chunks, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNKS)
    seat = tl.load(seats + row)
    chunk = seat // BLOCK
    total = tl.sum(tl.load(sums + row * chunks + c, mask=c < chunk, other=0.0), 0)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(order + row * V + at, mask=at < seat, other=0) - row * V
    base = draft + ((row // L) * P + tl.load(nodes + row)) * V
    tl.store(below + row, total + tl.sum(tl.load(base + token, mask=at < seat, other=0.0).to(tl.float64), 0))


@triton.jit
def _powers(high, low, K):
    """(high^K - low^K) / (high - low)."""
    total, power = high * 0.0 + 1.0, low + high * 0.0
    for _ in range(K - 1):
        total = power + total * high
        power *= low
    return total


@triton.jit
def _line(below, p, q, line, weights, K, L, DP: tl.constexpr):
    """For each depth the mass of what ranks below the path, its own mass, and what makes the kept law one; and the
    weights of block verification on it."""
    b, d = tl.program_id(0).to(tl.int64), tl.arange(0, DP)
    inside, place = d < L, b * L + d
    draft, under = tl.load(p + place, mask=inside, other=1.0), tl.load(below + place, mask=inside, other=0.0)
    mass = tl.reduce(tl.where(d[None, :] < d[:, None], draft[None, :], 1.0), 1, _multiply)
    lower = tl.sum(tl.where(d[None, :] < d[:, None], (mass * under)[None, :], 0.0), 1)
    whole = tl.maximum(lower + mass, 1e-300)
    lower, mass = lower / whole, mass / whole
    norm = 1 / _powers(lower * 0.0 + 1.0, lower, K)
    low = lower + mass * under
    kept = draft * _powers(low + mass * draft, low, K) * norm
    log = tl.maximum(tl.log(tl.load(q + place, mask=inside, other=1.0)) - tl.log(kept), 10 * FLOOR)
    log = tl.where(inside, log, 0.0)
    total = tl.sum(tl.where(d[None, :] < d[:, None], log[None, :], 0.0), 1)
    peak = tl.max(tl.where(d[None, :] <= d[:, None], total[None, :], 1000 * FLOOR), 1)
    tl.store(weights + b * (L + 1) + d, tl.exp(total - peak), mask=d <= L)
    tl.store(line + place * 3, lower, mask=inside)
    tl.store(line + place * 3 + 1, mass, mask=inside)
    tl.store(line + place * 3 + 2, norm, mask=inside)


@triton.jit
def _kept(
    order, target, draft, nodes, sums, line, weights, kept, left, V, N, P, K, L, chunks,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, chunk, c = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, CHUNKS)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    inside, b, node = at < V, row // L, tl.load(nodes + row)
    token = tl.load(order + row * V + at, mask=inside, other=0) - row * V
    p = tl.load(draft + (b * P + node) * V + token, mask=inside, other=0.0).to(tl.float64)
    q = tl.load(target + (b * N + node) * V + token, mask=inside, other=0.0).to(tl.float64)
    before = tl.sum(tl.load(sums + row * chunks + c, mask=c < chunk, other=0.0), 0) + tl.cumsum(p, 0) - p
    lower, mass, norm = tl.load(line + row * 3), tl.load(line + row * 3 + 1), tl.load(line + row * 3 + 2)
    low = lower + mass * before
    law = p * _powers(low + mass * p, low, K) * norm
    tl.store(kept + row * V + token, law, mask=inside)
    weight = tl.load(weights + b * (L + 1) + row % L)
    tl.store(left + row * chunks + chunk, tl.sum(tl.where(inside, tl.maximum(q * weight - law, 0.0), 0.0), 0))


def kept_law(
    target: Tensor,
    draft: Tensor,
    nodes_BL: Tensor,
    tokens_BL: Tensor,
    p_BL: Tensor,
    q_BL: Tensor,
    order: Tensor,
    K: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """`eval.rules_chain.kept_law`; `order` [B L V] is what a sort of all rows at once gives."""
    B, L = nodes_BL.shape
    V, chunks, new = target.shape[2], triton.cdiv(target.shape[2], BLOCK), p_BL.new_empty
    sums, left, line, kept = new(B, L, chunks), new(B, L, chunks), new(B, L, 3), new(B, L, V)
    weights, below, seats, nodes = new(B, L + 1), new(B, L), torch.empty_like(nodes_BL), nodes_BL.contiguous()
    wide, grid, P = triton.next_power_of_2(chunks), (B * L, chunks), draft.shape[1]
    _ranked_sums[grid](order, draft, nodes, tokens_BL.contiguous(), sums, seats, V, P, L, chunks, BLOCK, num_warps=8)
    _below[(B * L,)](order, draft, nodes, sums, seats, below, V, P, L, chunks, wide, BLOCK, num_warps=8)
    _line[(B,)](below, p_BL, q_BL, line, weights, K, L, max(2, triton.next_power_of_2(L + 1)), num_warps=1)
    _kept[grid](
        order, target, draft, nodes, sums, line, weights, kept, left, V, target.shape[1], P, K, L, chunks, wide, BLOCK,
        num_warps=8,
    )  # fmt: skip
    return kept, weights, left.sum(2)
