"""Kernels of the rules that judge a tree (eval.rules_tree, eval.rules_traversal), for a GPU: between two passes over
whole laws everything small happens in one launch.

B rows, K paths, L drafted tokens, M inner nodes, N nodes. Solvers run a program a node, walks a program a row whose
lanes d are the depths of a path.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eval.kernels import BLOCK, FLOOR, TINY, _multiply, parts


@triton.jit
def _paths_at(row, counts, first, K, L, M):
    """How many paths go through an inner node; 0 where no node is."""
    b, m = (row // M).to(tl.int64), row % M
    k = tl.where(m > 0, (m - 1) % K, 0)
    depth = tl.where(m > 0, (m - 1) // K + 1, 0)
    place = (b * K + k) * (L + 1) + depth
    return tl.where(tl.load(first + place) == k, tl.load(counts + place), 0)


@triton.jit
def _sum_of_powers(x, n):
    """1 + x + ... + x^(n - 1), and x^(n - 1)."""
    total, power = x * 0.0, x * 0.0 + 1.0
    for _ in range(n):
        total += power
        power *= x
    # of its own, since a value that a loop only carried on from another came out of the compiler as it went in
    last = x * 0.0 + 1.0
    for _ in range(n - 1):
        last *= x
    return total, last


@triton.jit
def _select_step(sums, state, mix, counts, first, factor, K, L, M, chunks, STEP: tl.constexpr, CHUNKS: tl.constexpr):
    row, c = tl.program_id(0), tl.arange(0, CHUNKS)
    paths = tl.maximum(_paths_at(row, counts, first, K, L, M), 1)
    if STEP == 0:
        low, rho = 1.0 + 0.0 * paths.to(tl.float64), paths.to(tl.float64)
    else:
        low, rho = tl.load(state + row * 2), tl.load(state + row * 2 + 1)
        beta = tl.minimum(tl.sum(tl.load(sums + row * chunks + c, mask=c < chunks, other=0.0), 0), 1.0)
        found, _ = _sum_of_powers(1.0 - beta, paths)
        if STEP == 3:
            tl.store(factor + row, found)
        above = found > (low + rho) / 2
        low, rho = tl.where(above, found, low), tl.where(above, rho, found)
        if STEP == 2:  # what comes out is a side of the interval: between them it might not be exact
            low = rho
    if STEP < 3:
        tl.store(state + row * 2, low)
        tl.store(state + row * 2 + 1, rho)
        tl.store(mix + row * 5, 0.0)
        tl.store(mix + row * 5 + 1, 0.0)
        tl.store(mix + row * 5 + 2, -1.0)
        tl.store(mix + row * 5 + 3, 2 / (low + rho))
        tl.store(mix + row * 5 + 4, 0.0)


def select(target: Tensor, draft: Tensor, counts: Tensor, first: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """`eval.rules_tree.solved`: a factor rho and kappa(rho) for each inner node [B, M]."""
    B, K, D = counts.shape
    M = 1 + (D - 2) * K
    state, mix = target.new_empty(B, M, 2, dtype=torch.float64), target.new_empty(B, M, 5, dtype=torch.float64)
    factor, sums = torch.empty_like(state[..., 0]), state
    for step in range(steps + 2):
        chunks = sums.shape[2] if step else 1
        kind = 0 if step == 0 else 1 if step < steps else 2 if step == steps else 3
        _select_step[(B * M,)](
            sums, state, mix, counts, first, factor, K, D - 1, M, chunks, kind, triton.next_power_of_2(chunks),
            num_warps=1,
        )  # fmt: skip
        if kind < 3:
            sums = parts(target, draft, mix, None)
    return 1 / mix[..., 3], factor


@triton.jit
def _meant_of_chunk(target, draft, odds, out, V, N, P, M, K, chunks, BLOCK: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, node, at = row // M, row % M, chunk * BLOCK + tl.arange(0, BLOCK)
    q = tl.load(target + (b * N + node) * V + at, mask=at < V, other=0.0).to(tl.float64)
    p = tl.load(draft + (b * P + node) * V + at, mask=at < V, other=0.0).to(tl.float64) * tl.load(odds + row)
    fails, never = 1 - tl.minimum(p, q) / tl.where(q > 0.0, q, 1.0), q * 0.0 + 1.0
    for _ in range(K):
        never *= fails
    tl.store(out + row * chunks + chunk, tl.sum(q * (1 - never), 0))


def meant_onward(target: Tensor, draft: Tensor, odds_BM: Tensor, paths: int) -> Tensor:
    """`eval.rules_gbv.meant_onward`."""
    (B, M), V, chunks = odds_BM.shape, target.shape[2], triton.cdiv(target.shape[2], BLOCK)
    out, sizes = odds_BM.new_empty(B, M, chunks), (V, target.shape[1], draft.shape[1], M, paths, chunks)
    _meant_of_chunk[(B * M, chunks)](target, draft, odds_BM.contiguous(), out, *sizes, BLOCK, num_warps=8)
    return out.sum(2)


@triton.jit
def _promote_step(sums, state, mix, counts, first, mean, K, L, M, chunks, STEP: tl.constexpr, CHUNKS: tl.constexpr):
    row, c = tl.program_id(0), tl.arange(0, CHUNKS)
    paths = _paths_at(row, counts, first, K, L, M)
    some = 0.0 * paths.to(tl.float64)
    low, high, middle, low_value, high_value = some, some + 1.0, some + 1 / 3, some + 0.1, some - 0.1
    if STEP > 0:
        low, high, middle = tl.load(state + row * 5), tl.load(state + row * 5 + 1), tl.load(state + row * 5 + 2)
        low_value, high_value = tl.load(state + row * 5 + 3), tl.load(state + row * 5 + 4)
        found = tl.minimum(tl.sum(tl.load(sums + row * chunks + c, mask=c < chunks, other=0.0), 0), 1.0)
        if STEP == 2:
            tl.store(mean + row, found)
        value = found - middle
        more = value > 0
        low, low_value = tl.where(more, middle, low), tl.where(more, value, low_value / 2)
        high, high_value = tl.where(more, high, middle), tl.where(more, high_value / 2, value)
        middle = (high * low_value - low * high_value) / tl.maximum(low_value - high_value, TINY)
    if STEP < 2:
        tl.store(state + row * 5, low)
        tl.store(state + row * 5 + 1, high)
        tl.store(state + row * 5 + 2, middle)
        tl.store(state + row * 5 + 3, low_value)
        tl.store(state + row * 5 + 4, high_value)
        middle = tl.minimum(tl.maximum(middle, 0.0), 1.0)
        most, least = _sum_of_powers(1.0 - middle, paths)
        gain = tl.where(paths > 1, 1.0, 0.0) / tl.maximum(most - least, 1e-9)
        tl.store(mix + row * 5, 0.0)
        tl.store(mix + row * 5 + 1, 0.0)
        tl.store(mix + row * 5 + 2, -1.0)
        tl.store(mix + row * 5 + 3, gain)
        tl.store(mix + row * 5 + 4, gain * least)


def promote(target: Tensor, draft: Tensor, counts: Tensor, first: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """`eval.rules_traversal.promotion` without its coins: a mix whose last columns are gain and cost [B, M, 5], and the
    mean [B, M]."""
    B, K, D = counts.shape
    M = 1 + (D - 2) * K
    state, mix = target.new_empty(B, M, 5, dtype=torch.float64), target.new_empty(B, M, 5, dtype=torch.float64)
    mean, sums = torch.empty_like(state[..., 0]), state
    for step in range(steps + 2):
        chunks = sums.shape[2] if step else 1
        kind = 0 if step == 0 else 1 if step <= steps else 2
        _promote_step[(B * M,)](
            sums, state, mix, counts, first, mean, K, D - 1, M, chunks, kind, triton.next_power_of_2(chunks),
            num_warps=1,
        )  # fmt: skip
        if kind < 2:
            sums = parts(target, draft, mix, None)
    return mix, mean


@triton.jit
def _line_up(
    nodes, alike, counts, p, q, coins, mix, mean, cells, lined, shared, K, L, M, KP: tl.constexpr, PROMOTE: tl.constexpr
):
    b, k = tl.program_id(0).to(tl.int64), tl.arange(0, KP)
    inside = k < K
    both = inside[:, None] & inside[None, :]
    pair = ((b * K + k[:, None]) * K + k[None, :]) * (L + 1)
    before = tl.zeros([KP, KP], tl.int32)
    agree = tl.zeros([KP, KP], tl.int32)
    for turn in tl.static_range(2):  # first the order, then the paths in it
        seat = tl.sum(before, 0)
        for d in range(L):
            place = (b * K + k) * L + d
            node = b * M + tl.load(nodes + (b * K + k) * (L + 1) + d, mask=inside, other=0)
            draft, target = tl.load(p + place, mask=inside, other=1.0), tl.load(q + place, mask=inside, other=0.0)
            up, average, flag = draft * 0.0, draft * 0.0, k < 0
            if PROMOTE:
                share = target * tl.load(mix + node * 5 + 3, mask=inside, other=0.0)
                share -= draft * tl.load(mix + node * 5 + 4, mask=inside, other=0.0)
                up = tl.minimum(tl.maximum(share, 0.0), draft)
                average = tl.load(mean + node, mask=inside, other=0.0)
                flag = inside & (tl.load(coins + place, mask=inside, other=1.0) < up / draft)
            behind = tl.load(alike + pair + d, mask=both, other=0) > 0
            same = tl.load(alike + pair + d + 1, mask=both, other=0) > 0
            if turn == 0:
                code = k + tl.where(flag, 0, K)
                across = tl.min(tl.where(same, code[:, None], 2 * KP), 0)  # the key of the child on each path
                down = tl.min(tl.where(same, code[None, :], 2 * KP), 1)
                before = tl.where(behind & (same == 0), (down[:, None] < across[None, :]).to(tl.int32), before)
                agree += same.to(tl.int32)
                if d == L - 1:
                    before = tl.where(same, (k[:, None] < k[None, :]).to(tl.int32), before)
                    before = tl.where(both, before, 0)
            else:
                flagged = tl.max(tl.where(same & flag[None, :], 1, 0), 1)
                many = tl.load(counts + (b * K + k) * (L + 1) + d, mask=inside, other=1)
                high, low = draft * 0.0, draft * 0.0
                power = draft * 0.0 + 1.0
                for i in range(K):
                    high += tl.where(i < many, power, 0.0)
                    low = tl.where(i < many, power, low)
                    power *= 1.0 - average
                rest = draft - up
                ratio = tl.log(target / tl.maximum(up * high + rest * low, TINY))
                into = cells + ((b * K + seat) * L + d) * 8
                tl.store(into, target, mask=inside)
                tl.store(into + 1, up, mask=inside)
                tl.store(into + 2, rest, mask=inside)
                tl.store(into + 3, tl.maximum(ratio, FLOOR), mask=inside)
                tl.store(into + 4, average, mask=inside)
                tl.store(into + 5, high, mask=inside)
                tl.store(into + 6, low, mask=inside)
                tl.store(into + 7, flagged.to(tl.float64), mask=inside)
        if turn == 1:
            for d in range(L + 1):
                node = tl.load(nodes + (b * K + k) * (L + 1) + d, mask=inside, other=0)
                tl.store(lined + (b * K + seat) * (L + 1) + d, node, mask=inside)
            previous = tl.where(seat[None, :] == seat[:, None] - 1, agree, 0)
            tl.store(shared + b * K + seat, tl.sum(tl.where(both, previous, 0), 1).to(tl.int64), mask=inside)


@triton.jit
def _capped_from(log, fork, weight, d, L):
    """Weights along a path from the one that it has after its (fork + 1)-th token."""
    total = tl.sum(tl.where(d[None, :] < d[:, None], log[None, :], 0.0), 1)
    start = total - tl.maximum(tl.log(weight), FLOOR)
    caps = tl.where(d > fork + 1, total, tl.where(d == fork + 1, start, (L + 1) * FLOOR))
    peak = tl.max(tl.where(d[None, :] <= d[:, None], caps[None, :], (L + 1) * FLOOR), 1)
    return tl.exp(tl.minimum(total - peak, 0.0))


@triton.jit
def _at(d, place, values):
    return tl.sum(tl.where(d == place, values, 0.0), 0)


@triton.jit
def _walk_step(
    cells, lined, shared, promo, sums, state, leaves, mix, rows, K, L, M, chunks, k,
    PROMOTE: tl.constexpr, DP: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    b, d = tl.program_id(0).to(tl.int64), tl.arange(0, DP)
    inner = d < L
    own = cells + ((b * K + k) * L + d) * 8
    log = tl.load(own + 3, mask=inner, other=0.0)
    mean = tl.load(own + 4, mask=inner, other=0.0)
    fork = tl.load(shared + b * K + k).to(tl.int32)
    weight = tl.sum(log * 0.0, 0) + 1.0
    if k == 0:
        fork = fork * 0 - 1
    at = tl.minimum(tl.maximum(fork, 0), L - 1)
    old = state + ((b * K + tl.maximum(k - 1, 0)) * L + d) * 9
    s0, s1, s2 = weight + log * 0.0, weight + log * 0.0, log * 0.0
    s3, s4, s5, s6, s7, s8 = s2, s2 + 1.0, s2, s2, s2, s2
    leaf = weight
    if k > 0:
        leaf = tl.load(leaves + b * K + k - 1)
        s0, s1 = tl.load(old, mask=inner, other=0.0), tl.load(old + 1, mask=inner, other=0.0)
        s2, s3 = tl.load(old + 2, mask=inner, other=0.0), tl.load(old + 3, mask=inner, other=0.0)
        s4, s5 = tl.load(old + 4, mask=inner, other=1.0), tl.load(old + 5, mask=inner, other=0.0)
        s6, s7 = tl.load(old + 6, mask=inner, other=0.0), tl.load(old + 7, mask=inner, other=0.0)
        s8 = tl.load(old + 8, mask=inner, other=0.0)
        entered, factor = _at(d, at, s0), _at(d, at, s4)
        gone_up, gone = _at(d, at, s2) + factor * _at(d, at, s7), _at(d, at, s3) + factor * _at(d, at, s8)
        last = cells + ((b * K + k - 1) * L + at) * 8
        left_up, left = _at(d, at, s5) - tl.load(last + 1), _at(d, at, s6) - tl.load(last + 2)
        c = tl.arange(0, CHUNKS)
        due = tl.sum(tl.load(sums + b * chunks + c, mask=c < chunks, other=0.0), 0) / factor
        rejected = tl.maximum(due + 1 - _at(d, at, s1), TINY)
        factor = tl.maximum(factor * rejected, TINY)
        here = cells + ((b * K + k) * L + at) * 8
        flagged = tl.load(here + 7)
        next_up, following = flagged / tl.maximum(left_up, TINY), (1.0 - flagged) / tl.maximum(left, TINY)
        up, rest = tl.load(here + 1), tl.load(here + 2)
        weight = tl.maximum(entered * tl.load(here) - gone_up * up - gone * rest, 0.0) / factor
        weight = tl.minimum(weight / tl.maximum(next_up * up + following * rest, TINY), 1.0)
        new = d == fork
        s1, s2, s3 = tl.where(new, due / rejected, s1), tl.where(new, gone_up, s2), tl.where(new, gone, s3)
        s4, s5, s6 = tl.where(new, factor, s4), tl.where(new, left_up, s5), tl.where(new, left, s6)
        s7, s8 = tl.where(new, next_up, s7), tl.where(new, following, s8)
    weights = _capped_from(log, fork, weight, d, L)
    below = d > fork
    s0, s1 = tl.where(below, weights, s0), tl.where(below, weights, s1)
    s2, s3, s4 = tl.where(below, 0.0, s2), tl.where(below, 0.0, s3), tl.where(below, 1.0, s4)
    s5, s6 = tl.where(below, mean, s5), tl.where(below, 1.0 - mean, s6)
    s7 = tl.where(below, tl.load(own + 5, mask=inner, other=0.0), s7)
    s8 = tl.where(below, tl.load(own + 6, mask=inner, other=0.0), s8)
    into = state + ((b * K + k) * L + d) * 9
    tl.store(into, s0, mask=inner)
    tl.store(into + 1, s1, mask=inner)
    tl.store(into + 2, s2, mask=inner)
    tl.store(into + 3, s3, mask=inner)
    tl.store(into + 4, s4, mask=inner)
    tl.store(into + 5, s5, mask=inner)
    tl.store(into + 6, s6, mask=inner)
    tl.store(into + 7, s7, mask=inner)
    tl.store(into + 8, s8, mask=inner)
    tl.store(leaves + b * K + k, tl.where(fork < L, _at(d, L, weights), leaf))
    if k + 1 < K:  # what the next path's fork is due
        fork = tl.load(shared + b * K + k + 1).to(tl.int32)
        at = tl.minimum(fork, L - 1)
        node = tl.load(lined + (b * K + k + 1) * (L + 1) + at)
        factor = _at(d, at, s4)
        gone_up, gone = _at(d, at, s2) + factor * _at(d, at, s7), _at(d, at, s3) + factor * _at(d, at, s8)
        tl.store(rows + b, node)
        tl.store(mix + b * 5, _at(d, at, s0))
        tl.store(mix + b * 5 + 1, gone)
        tl.store(mix + b * 5 + 2, gone_up - gone)
        if PROMOTE:
            tl.store(mix + b * 5 + 3, tl.load(promo + (b * M + node) * 5 + 3))
            tl.store(mix + b * 5 + 4, tl.load(promo + (b * M + node) * 5 + 4))
        else:
            tl.store(mix + b * 5 + 3, 0.0)
            tl.store(mix + b * 5 + 4, 0.0)


@triton.jit
def _gather(lined, shared, state, promo, mix, weights, K, L, M, N, PROMOTE: tl.constexpr, DP: tl.constexpr):
    """The mix and (weight, factor) with which every node is left, leaves included."""
    b, d = tl.program_id(0).to(tl.int64), tl.arange(0, DP)
    for k in range(K):
        after = tl.load(shared + b * K + tl.minimum(k + 1, K - 1)).to(tl.int32)
        after = tl.where(k + 1 < K, after, -1)
        node = tl.load(lined + (b * K + k) * (L + 1) + d, mask=d <= L, other=0)
        inner, ends = (d < L) & (d > after), (d == L) & (d > after)
        s = state + ((b * K + k) * L + d) * 9
        factor = tl.load(s + 4, mask=inner, other=0.0)
        gone_up = tl.load(s + 2, mask=inner, other=0.0) + factor * tl.load(s + 7, mask=inner, other=0.0)
        gone = tl.load(s + 3, mask=inner, other=0.0) + factor * tl.load(s + 8, mask=inner, other=0.0)
        into = mix + (b * N + node) * 5
        gain, cost = factor * 0.0, factor * 0.0
        if PROMOTE:
            gain = tl.load(promo + (b * M + node) * 5 + 3, mask=inner, other=0.0)
            cost = tl.load(promo + (b * M + node) * 5 + 4, mask=inner, other=0.0)
        tl.store(into, tl.where(ends, 1.0, tl.load(s, mask=inner, other=0.0)), mask=inner | ends)
        tl.store(into + 1, gone, mask=inner | ends)
        tl.store(into + 2, gone_up - gone, mask=inner | ends)
        tl.store(into + 3, gain, mask=inner | ends)
        tl.store(into + 4, cost, mask=inner | ends)
        tl.store(weights + (b * M + node) * 2, tl.load(s + 1, mask=inner, other=0.0), mask=inner)
        tl.store(weights + (b * M + node) * 2 + 1, factor, mask=inner)


@triton.jit
def _ends(lined, shared, leaves, weights, sums, law, K, L, M, N, chunks, DP: tl.constexpr, CHUNKS: tl.constexpr):
    b, d, c = tl.program_id(0).to(tl.int64), tl.arange(0, DP), tl.arange(0, CHUNKS)
    alive = tl.sum(d * 0.0, 0).to(tl.float64) + 1.0
    for k in range(K):
        after = tl.load(shared + b * K + tl.minimum(k + 1, K - 1)).to(tl.int32)
        after = tl.where(k + 1 < K, after, -1)
        node = tl.load(lined + (b * K + k) * (L + 1) + d, mask=d <= L, other=0)
        last, inner = (d <= L) & (d > after), (d < L) & (d > after)
        due = (b * M + node[:, None]) * chunks + c[None, :]
        due = tl.sum(tl.load(sums + due, mask=inner[:, None] & (c < chunks)[None, :], other=0.0), 1)
        due = due / tl.load(weights + (b * M + node) * 2 + 1, mask=inner, other=1.0)
        weight = tl.load(weights + (b * M + node) * 2, mask=inner, other=0.0)
        accept = tl.minimum(due / tl.maximum(due + 1 - weight, TINY), 1.0)
        accept = tl.where(d == 0, 1.0, tl.where(d == L, tl.load(leaves + b * K + k), accept))
        accept = tl.where(last, accept, 0.0)
        deeper = tl.where(d[None, :] > d[:, None], 1 - accept[None, :], 1.0)
        tl.store(law + b * N + node, alive * accept * tl.reduce(deeper, 1, _multiply), mask=last)
        alive = alive * tl.reduce(1 - accept, 0, _multiply)


def traverse(
    target: Tensor, draft: Tensor, coins: Tensor, outline: tuple[Tensor, ...], promo: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """`eval.rules_traversal.traverse`: the law over nodes [B, N] and the mix after each [B, N, 5]. `outline` is alike,
    counts, nodes, p and q of the drafts, `promo` what `promote` gave, None where nothing is promoted."""
    alike, counts, nodes, p, q = outline
    (B, K, L), N, new = p.shape, target.shape[1], p.new_empty
    M, DP = 1 + (L - 1) * K, max(2, triton.next_power_of_2(L + 1))
    cells, lined, shared = new(B, K, L, 8), torch.empty_like(nodes), nodes.new_empty(B, K)
    promoted = promo is not None
    shares, mean = promo if promo is not None else (cells, cells)
    _line_up[(B,)](
        nodes, alike.view(torch.uint8), counts, p, q, coins.contiguous(), shares, mean, cells, lined, shared, K, L, M,
        max(2, triton.next_power_of_2(K)), promoted, num_warps=1,
    )  # fmt: skip
    state, leaves = new(B, K, L, 9), new(B, K)
    fork, rows, sums = new(B, 1, 5), nodes.new_empty(B, 1), cells
    for k in range(K):
        chunks = sums.shape[2] if k else 1
        _walk_step[(B,)](
            cells, lined, shared, shares, sums, state, leaves, fork, rows, K, L, M, chunks, k, promoted, DP,
            triton.next_power_of_2(chunks), num_warps=1,
        )  # fmt: skip
        if k + 1 < K:
            sums = parts(target, draft, fork, rows)
    mix, weights, law = new(B, N, 5), new(B, M, 2), p.new_zeros(B, N)
    _gather[(B,)](lined, shared, state, shares, mix, weights, K, L, M, N, promoted, DP, num_warps=1)
    sums = parts(target, draft, mix[:, :M], None)
    chunks = sums.shape[2]
    _ends[(B,)](
        lined, shared, leaves, weights, sums, law, K, L, M, N, chunks, DP, triton.next_power_of_2(chunks), num_warps=4
    )
    return law, mix
