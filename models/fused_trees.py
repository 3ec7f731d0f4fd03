"""Kernels for draft trees on a GPU (Triton): growing them, choosing what is verified, walking them, and remembering
what the target said about them, in a launch or two each.

The plain functions are the references: of eval.drafting `EagleDrafting.grow`, `Frontier.gated` and `rerank`, of
eval.tree `DraftTree.outline` and `compact`, of eval.matrix `retrieve` and `graft`, `eval.verify.accept` and
`eval.engine.remember`.

B rows, N nodes, M candidates, k branches, U uncommitted tokens, V vocabulary.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.fused_tokens import top


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


@triton.jit
def _gate(
    scores, stage, to_stage, running, threshold, gate, ungated, B, M, BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr
):
    b, m = tl.arange(0, BLOCK_B), tl.arange(0, BLOCK_M)
    inside = (b < B)[:, None] & (m < M)[None, :]
    score = tl.load(scores + b[:, None] * M + m[None, :], mask=inside, other=float("-inf"))
    before = tl.load(stage + b, mask=b < B, other=0)
    after = tl.where((before == ungated) & (tl.exp(tl.max(score, 1)) <= threshold), gate, before)
    tl.store(to_stage + b, after, mask=b < B)
    tl.store(running, tl.max(((after == ungated) & (b < B)).to(tl.int32), 0) > 0)


def gate(scores_BM: Tensor, stage_B: Tensor, gate: int, threshold: float, ungated: int) -> tuple[Tensor, Tensor]:
    """`eval.drafting.Frontier.gated`: the stages, and whether some row is still not gated (bool [])."""
    (B, M), stage = scores_BM.shape, torch.empty_like(stage_B, memory_format=torch.contiguous_format)
    running = torch.empty((), dtype=torch.bool, device=stage.device)
    blocks = triton.next_power_of_2(B), triton.next_power_of_2(M)
    given = scores_BM.contiguous(), stage_B.contiguous()
    _gate[(1,)](*given, stage, running, threshold, gate, ungated, B, M, *blocks, num_warps=4)
    return stage, running


@triton.jit
def _rank(scores, ranks, M, BLOCK_I: tl.constexpr, BLOCK: tl.constexpr):
    b, i = tl.program_id(0), tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    own = tl.load(scores + b * M + i, mask=i < M, other=float("-inf"))
    rank = tl.zeros([BLOCK_I], tl.int32)
    for start in range(0, M, BLOCK):
        j = start + tl.arange(0, BLOCK)
        other = tl.load(scores + b * M + j, mask=j < M, other=float("-inf"))[None, :]
        ahead = (other > own[:, None]) | ((other == own[:, None]) & (j[None, :] < i[:, None]))
        rank += tl.sum((ahead & (j < M)[None, :]).to(tl.int32), 1)
    tl.store(ranks + b * M + i, rank, mask=i < M)


@triton.jit
def _rerank(
    tokens, parents, scores, ranks, places, roots, budgets, to_tokens, to_parents, to_scores, to_valid, M, keep, W,
    BLOCK: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    b, at, w = tl.program_id(0), tl.arange(0, BLOCK), tl.arange(0, BLOCK_W)
    inside = at < M
    score = tl.load(scores + b * M + at, mask=inside, other=float("-inf"))
    rank = tl.load(ranks + b * M + at, mask=inside, other=M)
    chosen = (rank < tl.minimum(tl.load(budgets + b), keep)) & (score > float("-inf"))
    place = tl.cumsum(chosen.to(tl.int32), 0)  # in drafting order; the root's is 0
    kept = tl.sum(chosen.to(tl.int32), 0)
    tl.store(places + b * M + at, tl.where(chosen, place, 0), mask=inside)
    root = w == 0
    tl.store(to_tokens + b * W + w, tl.where(root, tl.load(roots + b), 0), mask=w < W)
    tl.store(to_parents + b * W + w, tl.zeros([BLOCK_W], tl.int64), mask=w < W)
    tl.store(to_scores + b * W + w, tl.where(root, 0.0, -1e9), mask=w < W)
    tl.store(to_valid + b * W + w, w <= kept, mask=w < W)
    tl.debug_barrier()  # places are read, and the chosen ones written over these, by other threads
    above = tl.load(parents + b * M + at, mask=chosen, other=0)
    up = tl.load(places + b * M + above - 1, mask=chosen & (above > 0), other=0)
    into = b * W + place
    tl.store(to_tokens + into, tl.load(tokens + b * M + at, mask=chosen, other=0), mask=chosen)
    tl.store(to_parents + into, up.to(tl.int64), mask=chosen)
    tl.store(to_scores + into, score, mask=chosen)


def rerank(
    tokens_BM: Tensor, parents_BM: Tensor, scores_BM: Tensor, roots_B: Tensor, budget_B: Tensor, keep: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`eval.drafting.rerank`: tokens, parents, scores and validity [B, 1 + keep] of the best candidates' tree."""
    B, M = tokens_BM.shape
    ranks, places = (torch.empty(B, M, dtype=torch.int32, device=roots_B.device) for _ in range(2))
    tokens, parents = (tokens_BM.new_empty(B, 1 + keep) for _ in range(2))
    scores, valid = scores_BM.new_empty(B, 1 + keep), torch.empty(B, 1 + keep, dtype=torch.bool, device=roots_B.device)
    _rank[(B, triton.cdiv(M, 32))](scores_BM, ranks, M, 32, 128, num_warps=4)
    _rerank[(B,)](
        tokens_BM, parents_BM, scores_BM, ranks, places, roots_B, budget_B, tokens, parents, scores, valid, M, keep,
        1 + keep, triton.next_power_of_2(M), triton.next_power_of_2(1 + keep), num_warps=4,
    )  # fmt: skip
    return tokens, parents, scores, valid


@triton.jit
def _ancestors(parents, seen, depths, N, depth, BLOCK: tl.constexpr):
    b, n, at = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    line = at == n
    above = tl.load(parents + b * N + n)
    for _ in range(depth):
        line = line | (at == above)
        above = tl.load(parents + b * N + above)
    tl.store(seen + (b * N + n).to(tl.int64) * N + at, line.to(tl.uint8), mask=at < N)
    tl.store(depths + b * N + n, tl.sum(line.to(tl.int64), 0) - 1)


def ancestors(parents_BN: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """`eval.tree.DraftTree.outline`."""
    B, N = parents_BN.shape
    seen = torch.empty(B, N, N, dtype=torch.uint8, device=parents_BN.device)
    depths = torch.empty_like(parents_BN, memory_format=torch.contiguous_format)
    _ancestors[(B, N)](parents_BN.contiguous(), seen, depths, N, depth, triton.next_power_of_2(N), num_warps=1)
    return seen.view(torch.bool), depths


@triton.jit
def _accept(
    chosen, tokens, parents, source, valid, depths, stage, merged, path, said, facts, N, depth, DEPTHS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    b, at, d = tl.program_id(0), tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    inside = at < N
    token = tl.load(tokens + b * N + at, mask=inside, other=-1)
    parent = tl.load(parents + b * N + at, mask=inside, other=-1)
    real = tl.load(valid + b * N + at, mask=inside, other=0) != 0
    node, count, nodes = b * 0, b * 0, d * 0
    next_token = tl.load(chosen + b * N)
    for step in range(depth):
        child = tl.min(tl.where(real & (at > 0) & (parent == node) & (token == next_token), at, BLOCK), 0)
        # once no child was found none will be: the same question is asked again
        node = tl.where(child < BLOCK, child, node)
        count += (child < BLOCK).to(tl.int32)
        next_token = tl.load(chosen + b * N + node)
        nodes = tl.where(d > step, node, nodes)
    width, kept = depth + 1, d <= depth
    verified = tl.sum(real.to(tl.int64), 0) - 1
    drafted = verified
    if DEPTHS:
        drafted = tl.max(tl.where(real, tl.load(depths + b * N + at, mask=inside, other=0), 0), 0)
    following = tl.gather(nodes, tl.minimum(d + 1, depth), 0)
    words = tl.load(tokens + b * N + following, mask=d < depth, other=0)
    words = tl.where((d == count) | (d == depth), next_token, words)
    tl.store(path + b * width + d, nodes.to(tl.int64), mask=kept)
    tl.store(said + b * width + d, words, mask=kept)
    row = facts + b * (5 + 2 * width)
    tl.store(row, count.to(tl.int64))
    tl.store(row + 1, verified)
    tl.store(row + 2, tl.load(stage + b))
    tl.store(row + 3, tl.load(merged + b))
    tl.store(row + 4, drafted)
    tl.store(row + 5 + d, words, mask=kept)
    tl.store(row + 5 + width + d, tl.load(source + b * N + nodes, mask=kept, other=0), mask=kept)


def accept(
    chosen_BN: Tensor, tokens_BN: Tensor, parents_BN: Tensor, source_BN: Tensor, valid_BN: Tensor,
    depths_BN: Tensor | None, stage_B: Tensor, merged_B: Tensor, depth: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`eval.verify.accept`."""
    B, N = tokens_BN.shape
    path, said = chosen_BN.new_empty(B, depth + 1), chosen_BN.new_empty(B, depth + 1)
    facts = chosen_BN.new_empty(B, 5 + 2 * (depth + 1))
    given = chosen_BN, tokens_BN, parents_BN, source_BN, valid_BN, chosen_BN if depths_BN is None else depths_BN
    _accept[(B,)](
        *(t.contiguous() for t in given), stage_B.contiguous(), merged_B.contiguous(), path, said, facts, N, depth,
        depths_BN is not None, *(max(2, triton.next_power_of_2(n)) for n in (N, depth + 1)), num_warps=1,
    )  # fmt: skip
    return path, said, facts


@triton.jit
def _graft(
    tokens, parents, scores, source, valid, roots, rows, above, ranks, wanted, stage, to_tokens, to_parents, to_scores,
    to_source, to_valid, merged, K, R, W, width, mark, levels, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
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
    # of the root and each template node: its parent and rank, the token retrieved, where it is in the joined tree and
    # its parent there, and whether it is in it, and merged
    inner = (r > 0) & (r <= R)
    up = tl.load(above + r - 1, mask=inner, other=0).to(tl.int32)
    rank = tl.load(ranks + r - 1, mask=inner, other=0)
    asked = tl.load(wanted + gate * R + r - 1, mask=inner, other=0) != 0
    found = tl.where(r == 0, root, -1)
    place, below, alive, same = r * 0, r * 0, (r == 0).to(tl.int32), r * 0
    for _ in range(levels):  # each settles one level more
        top_token, below = tl.gather(found, up, 0), tl.gather(place, up, 0)
        known = inner & (top_token >= 0)
        next_token = tl.load(rows + tl.maximum(top_token, 0) * width + rank, mask=known, other=-1)
        usable = asked & (tl.gather(alive, up, 0) > 0) & (next_token >= 0)
        hit = (parent[None, :] == below[:, None]) & (token[None, :] == next_token[:, None]) & (real & (at > 0))[None, :]
        equal = tl.min(tl.where(hit, at[None, :], BLOCK_K), 1)
        found = tl.where(r == 0, root, next_token)
        place = tl.where(r == 0, 0, tl.where(equal < BLOCK_K, equal, K + r - 1))
        alive = tl.where(r == 0, 1, usable.to(tl.int32))
        same = (usable & (equal < BLOCK_K)).to(tl.int32)
    tl.store(merged + b, tl.sum(same, 0).to(tl.int64))
    new = inner & (alive > 0) & (same == 0)
    kept = tl.sum(real.to(tl.int32), 0)
    # places in the compacted tree: how many nodes of it come before
    before = tl.cumsum(real.to(tl.int32), 0) - 1
    kept_up = tl.sum((real[None, :] & (at[None, :] < parent[:, None])).to(tl.int32), 1)
    used = real & (before < W)
    tl.store(to_tokens + b * W + before, token, mask=used)
    tl.store(to_parents + b * W + before, kept_up.to(tl.int64), mask=used)
    tl.store(to_scores + b * W + before, tl.load(scores + b * K + at, mask=drafted, other=0.0), mask=used)
    tl.store(to_source + b * W + before, tl.load(source + b * K + at, mask=drafted, other=0), mask=used)
    tl.store(to_valid + b * W + before, real, mask=used)
    before = kept + tl.cumsum(new.to(tl.int32), 0) - 1
    draft_up = tl.sum((real[None, :] & (at[None, :] < below[:, None])).to(tl.int32), 1)
    new_up = tl.sum((new[None, :] & (r[None, :] - 1 < (below - K)[:, None])).to(tl.int32), 1)
    used = new & (before < W)
    tl.store(to_tokens + b * W + before, found, mask=used)
    tl.store(to_parents + b * W + before, tl.where(below < K, draft_up, kept + new_up).to(tl.int64), mask=used)
    tl.store(to_scores + b * W + before, tl.full([BLOCK_R], -1e9, tl.float32), mask=used)
    tl.store(to_source + b * W + before, tl.zeros([BLOCK_R], tl.int64) + mark, mask=used)
    tl.store(to_valid + b * W + before, new, mask=used)


def graft(
    tree: list[Tensor], out: list[Tensor], roots_B: Tensor, rows: Tensor, template: tuple[Tensor, Tensor],
    wanted: Tensor, stage_B: Tensor, merged_B: Tensor, mark: int, levels: int,
) -> None:  # fmt: skip
    """`eval.matrix.retrieve` and `graft` and `eval.tree.compact` in one launch, into `out` and `merged`.

    `tree` and `out` are tokens, parents, scores, source and validity [B, K] and [B, W]; `template` the parents and
    ranks [R] of its nodes on so many levels, `wanted` [stages, R] those that a row's stage asks for, `mark` the
    retrieved nodes' source.
    """
    (B, K), R, W = tree[0].shape, len(template[0]), out[0].shape[1]
    blocks = (triton.next_power_of_2(size) for size in (K, 1 + R, W))
    _graft[(B,)](
        *(t.contiguous() for t in tree), roots_B, rows, *template, wanted, stage_B, *out, merged_B, K, R, W,
        rows.shape[1], mark, levels, *blocks, num_warps=4,
    )  # fmt: skip


@triton.jit
def _claim(tokens, scores, valid, alive, path, keys, owner, N, D):
    i = tl.program_id(0)
    b, n = i // N, i % N
    on_path = n < 0
    for d in range(D):
        on_path = on_path | (tl.load(path + b * D + d) == n)
    # of nodes with one token: those of the path, then the higher score (a float's bits grow with it), then the later
    worse = tl.abs(tl.minimum(tl.load(scores + i), 0.0)).to(tl.int32, bitcast=True).to(tl.int64)
    key = ((on_path.to(tl.int64) << 31) + 0x7FFFFFFF - worse) * (1 << 24) + i
    teaches = (tl.load(valid + i) != 0) & (tl.load(alive + b) != 0)
    tl.store(keys + i, tl.where(teaches, key, -2))
    tl.atomic_max(owner + tl.load(tokens + i), key, mask=teaches)


@triton.jit
def _write(tokens, keys, owner, best, rows, W, BLOCK: tl.constexpr):
    i, w = tl.program_id(0), tl.arange(0, BLOCK)
    token = tl.load(tokens + i)
    if tl.load(owner + token) == tl.load(keys + i):
        tl.store(rows + token * W + w, tl.load(best + i * W + w, mask=w < W, other=0), mask=w < W)
        tl.store(owner + token, -1)  # the others of this token find no key of theirs there either


def remember(
    tree: tuple[Tensor, Tensor, Tensor],
    path_BD: Tensor,
    logits_BNV: Tensor,
    alive_B: Tensor,
    rows: Tensor,
    owner: Tensor,
) -> None:
    """`eval.engine.remember`: `tree` is tokens, scores and validity [B, N]; `rows` [V + 1, W] is the matrix, `owner`
    [V + 1] holds -1."""
    tokens, scores, valid = (t.contiguous() for t in tree)
    nodes, W = tokens.numel(), rows.shape[1]
    _, best, _ = top(logits_BNV, W)
    keys = torch.empty_like(tokens)
    path = path_BD.contiguous()
    _claim[(nodes,)](
        tokens, scores, valid, alive_B, path, keys, owner, tokens.shape[1], path.shape[1], num_warps=1
    )  # fmt: skip
    _write[(nodes,)](tokens, keys, owner, best, rows, W, triton.next_power_of_2(W), num_warps=1)
