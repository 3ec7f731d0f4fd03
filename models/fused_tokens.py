"""Decoding kernels for a GPU (Triton): choosing tokens, and growing and walking draft trees, in a launch or two each.

The plain functions are the references: `models.sampling.top` and `draw`, `eval.drafting` and `eval.verify.walk`.

B rows, N nodes, V vocabulary, k branches, U uncommitted tokens.
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
        tl.store(indices + (row * chunks + chunk) * k + i, chunk * BLOCK + index)
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
        tl.store(chosen + row * k + i, tl.load(indices + row * chunks * k + index))
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


@triton.jit
def _walk(chosen, tokens, parents, valid, path, accepted, bonus, N, depth, BLOCK: tl.constexpr):
    b, at = tl.program_id(0), tl.arange(0, BLOCK)
    inside = at < N
    token = tl.load(tokens + b * N + at, mask=inside, other=-1)
    parent = tl.load(parents + b * N + at, mask=inside, other=-1)
    drafted = (tl.load(valid + b * N + at, mask=inside, other=0) != 0) & (at > 0)
    node, count = b * 0, b * 0
    said = tl.load(chosen + b * N)
    tl.store(path + b * (depth + 1), node.to(tl.int64))
    for step in range(depth):
        child = tl.min(tl.where(drafted & (parent == node) & (token == said), at, BLOCK), 0)
        # once no child was found none will be: the same question is asked again
        node = tl.where(child < BLOCK, child, node)
        count += (child < BLOCK).to(tl.int32)
        said = tl.load(chosen + b * N + node)
        tl.store(path + b * (depth + 1) + step + 1, node.to(tl.int64))
    tl.store(accepted + b, count.to(tl.int64))
    tl.store(bonus + b, said)


@triton.jit
def _graft(
    tokens, parents, scores, source, valid, roots, rows, above, ranks, wanted, stage, to_tokens, to_parents, to_scores,
    to_source, to_valid, merged, K, R, W, width, mark, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
):  # fmt: skip
    b, at, r, w = tl.program_id(0), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_W)
    tl.store(to_tokens + b * W + w, tl.zeros([BLOCK_W], tl.int64), mask=w < W)
    tl.store(to_parents + b * W + w, tl.zeros([BLOCK_W], tl.int64), mask=w < W)
    tl.store(to_valid + b * W + w, tl.zeros([BLOCK_W], tl.int1), mask=w < W)
    tl.debug_barrier()
    drafted = at < K
    token = tl.load(tokens + b * K + at, mask=drafted, other=-1)
    parent = tl.load(parents + b * K + at, mask=drafted, other=-1)
    real = tl.load(valid + b * K + at, mask=drafted, other=0) != 0
    root, gate = tl.load(roots + b), tl.load(stage + b)
    # of each template node: the token retrieved, where it is in the joined tree and its parent there, and whether it
    # is in it, and merged
    found, place, below = r * 0 - 1 + root * 0, r * 0 + root * 0, r * 0 + root * 0
    alive, same = r * 0, r * 0
    for i in range(R):
        parent_i = tl.load(above + i)
        up = r == parent_i - 1
        top_token = tl.where(parent_i == 0, root, tl.sum(tl.where(up, found, 0), 0))
        top_place = tl.sum(tl.where(up, place, 0), 0)
        usable = (parent_i == 0) | (tl.sum(tl.where(up, alive, 0), 0) > 0)
        next_token = tl.load(rows + tl.maximum(top_token, 0) * width + tl.load(ranks + i))
        next_token = tl.where(top_token >= 0, next_token, -1)
        usable = usable & (tl.load(wanted + gate * R + i) != 0) & (next_token >= 0)
        equal = tl.min(tl.where((parent == top_place) & (token == next_token) & real & (at > 0), at, BLOCK_K), 0)
        here, had = r == i, equal < BLOCK_K
        found = tl.where(here, next_token, found)
        below = tl.where(here, top_place, below)
        place = tl.where(here, tl.where(had, equal, K + i), place)
        alive = tl.where(here, usable.to(tl.int32), alive)
        same = tl.where(here, (usable & had).to(tl.int32), same)
    tl.store(merged + b, tl.sum(same, 0).to(tl.int64))
    new = (alive > 0) & (same == 0)
    kept = tl.sum(real.to(tl.int32), 0)
    # places in the compacted tree: how many nodes of it come before
    before = tl.cumsum(real.to(tl.int32), 0) - 1
    up = tl.sum((real[None, :] & (at[None, :] < parent[:, None])).to(tl.int32), 1)
    used = real & (before < W)
    tl.store(to_tokens + b * W + before, token, mask=used)
    tl.store(to_parents + b * W + before, up.to(tl.int64), mask=used)
    tl.store(to_scores + b * W + before, tl.load(scores + b * K + at, mask=drafted, other=0.0), mask=used)
    tl.store(to_source + b * W + before, tl.load(source + b * K + at, mask=drafted, other=0), mask=used)
    tl.store(to_valid + b * W + before, real, mask=used)
    before = kept + tl.cumsum(new.to(tl.int32), 0) - 1
    draft_up = tl.sum((real[None, :] & (at[None, :] < below[:, None])).to(tl.int32), 1)
    new_up = tl.sum((new[None, :] & (r[None, :] < (below - K)[:, None])).to(tl.int32), 1)
    used = new & (before < W)
    tl.store(to_tokens + b * W + before, found, mask=used)
    tl.store(to_parents + b * W + before, tl.where(below < K, draft_up, kept + new_up).to(tl.int64), mask=used)
    tl.store(to_scores + b * W + before, tl.full([BLOCK_R], -1e9, tl.float32), mask=used)
    tl.store(to_source + b * W + before, tl.zeros([BLOCK_R], tl.int64) + mark, mask=used)
    tl.store(to_valid + b * W + before, new, mask=used)


@triton.jit
def _expand(
    best, total, chosen, d2t, scores, index, stage, seen, tokens, parents, grown, next_tokens, next_scores, next_index,
    next_above, next_seen, U, first, ungated, K: tl.constexpr, BLOCK: tl.constexpr, BLOCK_U: tl.constexpr,
):  # fmt: skip
    b, at = tl.program_id(0), tl.arange(0, BLOCK)
    inside, above = at < K * K, at // K
    wide = b * K * K + at
    draft = tl.load(chosen + wide, mask=inside, other=0)
    token = draft + tl.load(d2t + draft, mask=inside, other=0)
    score = tl.load(scores + b * K + above, mask=inside, other=0.0) + tl.load(best + wide, mask=inside, other=0.0)
    score = score - tl.load(total + b * K + above, mask=inside, other=0.0)
    score = tl.where(tl.load(stage + b) == ungated, score, float("-inf"))
    tl.store(tokens + wide, token, mask=inside)
    tl.store(parents + wide, tl.load(index + b * K + above, mask=inside, other=0) + 1, mask=inside)
    tl.store(grown + wide, score, mask=inside)
    left = tl.where(inside, score, float("-inf"))
    free = inside.to(tl.int32)  # not chosen yet: the rows that a gate stopped hold nothing but -inf
    u = tl.arange(0, BLOCK_U)
    for i in tl.static_range(K):
        peak = tl.max(left, 0)
        place = tl.min(tl.where((left == peak) & (free > 0), at, K * K - 1), 0)  # of equal ones the first
        tl.store(next_tokens + b * K + i, tl.sum(tl.where(at == place, token, 0), 0))
        tl.store(next_scores + b * K + i, peak)
        tl.store(next_index + b * K + i, first + place)
        tl.store(next_above + b * K + i, place // K)
        line = tl.load(seen + (b * K + place // K) * U + u, mask=u < U, other=0)
        line = tl.where(u < U, line, (u == U + i).to(line.dtype))
        tl.store(next_seen + (b * K + i) * (U + K) + u, line, mask=u < U + K)
        left = tl.where(at == place, float("-inf"), left)
        free = tl.where(at == place, 0, free)


def expand(
    logits_BkV: Tensor, d2t: Tensor, scores_Bk: Tensor, index_Bk: Tensor, stage_B: Tensor, seen_BkU: Tensor, first: int,
    ungated: int,
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:  # fmt: skip
    """One layer of EAGLE's dynamic tree: the k best children of each of the k frontier nodes, as (tokens, parents,
    scores) [B, k*k]; and the next frontier: tokens, scores, candidate index, which node it hangs on [B, k], ancestors
    [B, k, U + k] (uint8). Rows whose `stage` is not `ungated` score -inf."""
    B, k, U = seen_BkU.shape
    best, chosen, total = top(logits_BkV, k)
    integers, seen = partial(logits_BkV.new_empty, dtype=torch.int64), seen_BkU.new_empty(B, k, U + k)
    tokens, parents, grown = integers((B, k * k)), integers((B, k * k)), torch.empty_like(best).view(B, k * k)
    next_tokens, next_index, above = integers((B, k)), integers((B, k)), integers((B, k))
    next_scores = torch.empty_like(scores_Bk)
    _expand[(B,)](
        best, total, chosen, d2t, scores_Bk, index_Bk, stage_B, seen_BkU, tokens, parents, grown, next_tokens,
        next_scores, next_index, above, seen, U, first, ungated, k, triton.next_power_of_2(k * k),
        triton.next_power_of_2(U + k), num_warps=4,
    )  # fmt: skip
    return (tokens, parents, grown), (next_tokens, next_scores, next_index, above, seen)


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


def graft(
    tree: list[Tensor], out: list[Tensor], roots_B: Tensor, rows: Tensor, template: tuple[Tensor, Tensor],
    wanted: Tensor, stage_B: Tensor, merged_B: Tensor, mark: int,
) -> None:  # fmt: skip
    """`eval.matrix.retrieve` and `graft` and `eval.tree.compact` in one launch, into `out` and `merged`.

    `tree` and `out` are tokens, parents, scores, source and validity [B, K] and [B, W]; `template` the parents and
    ranks [R] of its nodes, `wanted` [stages, R] those that a row's stage asks for, `mark` the retrieved nodes' source.
    """
    (B, K), R, W = tree[0].shape, len(template[0]), out[0].shape[1]
    blocks = (triton.next_power_of_2(size) for size in (K, R, W))
    _graft[(B,)](
        *(t.contiguous() for t in tree), roots_B, rows, *template, wanted, stage_B, *out, merged_B, K, R, W,
        rows.shape[1], mark, *blocks, num_warps=2,
    )  # fmt: skip


def walk(
    chosen_BN: Tensor, tokens_BN: Tensor, parents_BN: Tensor, valid_BN: Tensor, depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`eval.verify.walk` of a tree where the target's token at every node is known -> path, accepted, bonus."""
    B, N = tokens_BN.shape
    path, accepted = chosen_BN.new_empty(B, depth + 1), chosen_BN.new_empty(B)
    bonus = torch.empty_like(accepted)
    tree = (t.contiguous() for t in (chosen_BN, tokens_BN, parents_BN, valid_BN))
    _walk[(B,)](*tree, path, accepted, bonus, N, depth, triton.next_power_of_2(N), num_warps=1)
    return path, accepted, bonus


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
