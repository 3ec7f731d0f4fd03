"""The rules' kernels for a GPU (Triton): whole laws in one pass, and the small sums between passes in one launch.

Each is told by the plain function of the same name that it stands for, in eval.verify, eval.masses and the rules;
scripts/check_gpu.py compares them. B rows, K paths, L drafted tokens, M inner nodes, N nodes, V vocabulary, C columns
of a mix (eval.masses).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
TINY = tl.constexpr(1e-300)
FLOOR = tl.constexpr(-1e4)


@triton.jit
def _multiply(a, b):
    return a * b


@triton.jit
def _left(q, p, mix, C: tl.constexpr):
    """What a mix leaves of laws q and p."""
    left = q * tl.load(mix) - p * tl.load(mix + 1)
    if C == 5:
        share = tl.minimum(tl.maximum(q * tl.load(mix + 3) - p * tl.load(mix + 4), 0.0), p)
        left -= share * tl.load(mix + 2)
    return tl.maximum(left, 0.0)


@triton.jit
def _mass_of_chunk(
    target, draft, rows, mix, out, V, N, P, R, M, chunks,
    PICKED: tl.constexpr, OWN: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0), tl.program_id(1)
    node, b = row % R, (row // R).to(tl.int64)
    if PICKED:
        node = tl.load(rows + row)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    q = tl.load(target + (b * N + node) * V + at, mask=at < V, other=0.0).to(tl.float64)
    p = tl.load(draft + (b * P + node) * V + at, mask=(at < V) & (node < M), other=0.0).to(tl.float64)
    place = row
    if OWN:  # a mix for every node, a second sum for the target alone
        place = b * N + node
        tl.store(out + (row * 2 + 1) * chunks + chunk, tl.sum(q, 0))
        tl.store(out + row * 2 * chunks + chunk, tl.sum(_left(q, p, mix + place * C, C), 0))
    else:
        tl.store(out + row * chunks + chunk, tl.sum(_left(q, p, mix + place * C, C), 0))


def parts(target: Tensor, draft: Tensor, mix_BRC: Tensor, rows_BR: Tensor | None) -> Tensor:
    """`eval.masses.masses` by chunks of the vocabulary, yet to be summed [B, R, chunks] float64."""
    B, R, C = mix_BRC.shape
    V, chunks = target.shape[2], triton.cdiv(target.shape[2], BLOCK)
    out = torch.empty(B, R, chunks, dtype=torch.float64, device=target.device)
    picked = out if rows_BR is None else rows_BR.contiguous()
    _mass_of_chunk[(B * R, chunks)](
        target, draft, picked, mix_BRC.contiguous(), out, V, target.shape[1], draft.shape[1], R, draft.shape[1], chunks,
        rows_BR is not None, False, C, BLOCK, num_warps=8,
    )  # fmt: skip
    return out


@triton.jit
def _draw_left(
    target, draft, nodes, mix, sums, uniforms, out, V, N, P, M, chunks, stride,
    C: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, c = tl.program_id(0), tl.arange(0, CHUNKS)
    node, b = tl.load(nodes + row), row.to(tl.int64)
    mass = tl.load(sums + row * 2 * chunks + c, mask=c < chunks, other=0.0)
    plain = tl.load(sums + (row * 2 + 1) * chunks + c, mask=c < chunks, other=0.0)
    empty = tl.sum(mass, 0) <= 0.0
    mass = tl.where(empty, plain, mass)
    point = tl.load(uniforms + row * stride) * tl.sum(mass, 0)
    last = tl.max(tl.where(mass > 0.0, c, 0), 0)
    chunk = tl.minimum(tl.sum((tl.cumsum(mass, 0) <= point).to(tl.int32), 0), last)
    before = tl.sum(tl.where(c < chunk, mass, 0.0), 0)
    lane = tl.arange(0, BLOCK)
    at = chunk * BLOCK + lane
    q = tl.load(target + (b * N + node) * V + at, mask=at < V, other=0.0).to(tl.float64)
    p = tl.load(draft + (b * P + node) * V + at, mask=(at < V) & (node < M), other=0.0).to(tl.float64)
    left = tl.where(empty, q, _left(q, p, mix + (b * N + node) * C, C))
    last = tl.max(tl.where(left > 0.0, lane, 0), 0)
    index = tl.minimum(tl.sum((before + tl.cumsum(left, 0) <= point).to(tl.int32), 0), last)
    tl.store(out + row, (chunk * BLOCK + index).to(tl.int64))


def draw_left(target: Tensor, draft: Tensor, mix_BNC: Tensor, node_B: Tensor, uniform_B: Tensor, inner: int) -> Tensor:
    """A token [B] of what a node's mix leaves, of the target's own law where it leaves nothing; after the first `inner`
    nodes the draft has no law."""
    B, N, C = mix_BNC.shape
    V, chunks = target.shape[2], triton.cdiv(target.shape[2], BLOCK)
    sums = torch.empty(B, 2, chunks, dtype=torch.float64, device=target.device)
    out, mix = torch.empty_like(node_B), mix_BNC.contiguous()
    sizes = (V, N, draft.shape[1])
    _mass_of_chunk[(B, chunks)](
        target, draft, node_B, mix, sums, *sizes, 1, inner, chunks, True, True, C, BLOCK, num_warps=8
    )
    _draw_left[(B,)](
        target, draft, node_B, mix, sums, uniform_B, out, *sizes, inner, chunks, uniform_B.stride(0), C,
        triton.next_power_of_2(chunks), BLOCK, num_warps=8,
    )  # fmt: skip
    return out


@triton.jit
def _outline(
    tokens, draft, target, alike, first, counts, own, nodes, p, q, K, L, V, P, N, KP: tl.constexpr, LAWS: tl.constexpr
):
    b, k = tl.program_id(0).to(tl.int64), tl.arange(0, KP)
    inside = k < K
    same = inside[:, None] & inside[None, :]
    pair = ((b * K + k[:, None]) * K + k[None, :]) * (L + 1)
    for d in range(L + 1):
        leader = tl.min(tl.where(same, k[None, :], KP - 1), 1).to(tl.int64)
        place = (b * K + k) * (L + 1) + d
        node = tl.where(d > 0, leader + 1 + (d - 1) * K, 0)
        tl.store(first + place, leader, mask=inside)
        tl.store(counts + place, tl.sum(same.to(tl.int64), 1), mask=inside)
        tl.store(nodes + place, node, mask=inside)
        tl.store(alike + pair + d, same.to(tl.uint8), mask=inside[:, None] & inside[None, :])
        if d > 0:
            tl.store(own + (b * K + k) * L + d - 1, (leader == k).to(tl.uint8), mask=inside)
        if d < L:
            token = tl.load(tokens + (b * K + k) * L + d, mask=inside, other=0)
            tl.store(
                q + (b * K + k) * L + d, tl.load(target + (b * N + node) * V + token, mask=inside).to(tl.float64),
                mask=inside,
            )  # fmt: skip
            if LAWS:
                mass = tl.load(draft + (b * P + node) * V + token, mask=inside).to(tl.float64)
                tl.store(p + (b * K + k) * L + d, mass, mask=inside)
            same = same & (token[:, None] == tl.load(tokens + (b * K + k) * L + d, mask=inside, other=0)[None, :])


def outline(
    tokens: Tensor, draft: Tensor, target: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """alike, first, counts, own, nodes, p and q of `eval.verify.Drafts`."""
    B, K, L = tokens.shape
    whole, bools = tokens.new_empty(3, B, K, L + 1), tokens.new_empty(B * K * (K * (L + 1) + L), dtype=torch.uint8)
    alike, own = bools.split([B * K * K * (L + 1), B * K * L])
    masses = torch.empty(2, B, K, L, dtype=torch.float64, device=tokens.device)
    _outline[(B,)](
        tokens.contiguous(), draft, target, alike, whole[0], whole[1], own, whole[2], masses[0], masses[1], K, L,
        target.shape[2], draft.shape[1], target.shape[1], max(2, triton.next_power_of_2(K)), draft.shape[1] > 0,
        num_warps=1,
    )  # fmt: skip
    alike, own = alike.view(B, K, K, L + 1).view(torch.bool), own.view(B, K, L).view(torch.bool)
    return alike, whole[0], whole[1], own, whole[2], masses[0], masses[1]


@triton.jit
def _finish(law, uniforms, nodes, node, depth, path, K, L, N, stride, NP: tl.constexpr, DP: tl.constexpr):
    b, n, d = tl.program_id(0).to(tl.int64), tl.arange(0, NP), tl.arange(0, DP)
    mass = tl.load(law + b * N + n, mask=n < N, other=0.0)
    point = tl.load(uniforms + b * stride) * tl.sum(mass, 0)
    last = tl.max(tl.where(mass > 0.0, n, 0), 0)
    found = tl.minimum(tl.sum((tl.cumsum(mass, 0) <= point).to(tl.int32), 0), last)
    deep = (found + K - 1) // K
    on = tl.where(found > 0, (found - 1) % K, 0)
    tl.store(node + b, found.to(tl.int64))
    tl.store(depth + b, deep.to(tl.int64))
    at = (b * K + on) * (L + 1) + tl.minimum(d, deep)
    tl.store(path + b * (L + 1) + d, tl.load(nodes + at, mask=d <= L, other=0), mask=d <= L)


def finish(law_BN: Tensor, uniform_B: Tensor, nodes_BKD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The last accepted node [B], its depth [B] and the path to it [B, L + 1], of `eval.verify.settle`."""
    B, K, D = nodes_BKD.shape
    N, path = law_BN.shape[1], nodes_BKD.new_empty(B, D)
    node, depth = nodes_BKD.new_empty(B), nodes_BKD.new_empty(B)
    widths = triton.next_power_of_2(N), triton.next_power_of_2(D)
    _finish[(B,)](
        law_BN.contiguous(), uniform_B, nodes_BKD, node, depth, path, K, D - 1, N, uniform_B.stride(0), *widths
    )
    return node, depth, path


@triton.jit
def _health_of_chunk(laws, sums, wrong, V, chunks, BLOCK: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    law = tl.load(laws + row * V + at, mask=at < V, other=0.0).to(tl.float64)
    tl.store(sums + row * chunks + chunk, tl.sum(law, 0))
    tl.store(wrong + row * chunks + chunk, tl.sum(tl.where(law >= 0.0, 0, 1), 0))  # NaN is not above 0 either


@triton.jit
def _faults_of(nodes, inside, sums, wrong, tolerance, rows, chunks, c):
    """Are any of the laws after `nodes` no laws, and do any not sum to 1."""
    place, mask = (rows + nodes)[:, None] * chunks + c[None, :], inside[:, None] & (c < chunks)[None, :]
    total = tl.sum(tl.load(sums + place, mask=mask, other=0.0), 1)
    broken = (tl.sum(tl.load(wrong + place, mask=mask, other=0), 1) > 0) | (total - total != 0.0)
    broken = broken & inside
    off = inside & (broken == 0) & (tl.abs(total - 1.0) > tolerance)
    return tl.max(broken.to(tl.int32), 0), tl.max(off.to(tl.int32), 0)


@triton.jit
def _faults(
    nodes, p, target_sums, target_wrong, draft_sums, draft_wrong, out, tolerance, K, L, N, P, chunks,
    DP: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    b, d, c = tl.program_id(0).to(tl.int64), tl.arange(0, DP), tl.arange(0, CHUNKS)
    none = tl.program_id(0) * 0
    target_broken, target_off, draft_broken, draft_off, unsaid = none, none, none, none, none
    for k in range(K):
        node = tl.load(nodes + (b * K + k) * (L + 1) + d, mask=d <= L, other=0)
        broken, off = _faults_of(node, d <= L, target_sums, target_wrong, tolerance, b * N, chunks, c)
        target_broken, target_off = tl.maximum(target_broken, broken), tl.maximum(target_off, off)
        if P > 0:
            broken, off = _faults_of(node, d < L, draft_sums, draft_wrong, tolerance, b * P, chunks, c)
            draft_broken, draft_off = tl.maximum(draft_broken, broken), tl.maximum(draft_off, off)
            mass = tl.load(p + (b * K + k) * L + d, mask=d < L, other=1.0)
            unsaid = tl.maximum(unsaid, tl.max((mass == 0.0).to(tl.int32), 0))
    tl.store(out + b * 5, target_broken.to(tl.uint8))
    tl.store(out + b * 5 + 1, target_off.to(tl.uint8))
    tl.store(out + b * 5 + 2, draft_broken.to(tl.uint8))
    tl.store(out + b * 5 + 3, draft_off.to(tl.uint8))
    tl.store(out + b * 5 + 4, unsaid.to(tl.uint8))


def faults(target: Tensor, draft: Tensor, nodes_BKD: Tensor, p_BKL: Tensor, tolerance: float) -> Tensor:
    """`eval.rules.faults`."""
    (B, K, D), V, found = nodes_BKD.shape, target.shape[2], []
    chunks = triton.cdiv(V, BLOCK)
    for laws in (target, draft):
        rows = B * laws.shape[1]
        sums, wrong = p_BKL.new_empty(rows, chunks), nodes_BKD.new_empty(rows, chunks, dtype=torch.int32)
        if rows:
            _health_of_chunk[(rows, chunks)](laws.contiguous(), sums, wrong, V, chunks, BLOCK, num_warps=8)
        found += [sums, wrong]
    out = torch.empty(B, 5, dtype=torch.uint8, device=target.device)
    _faults[(B,)](
        nodes_BKD, p_BKL, *found, out, tolerance, K, D - 1, target.shape[1], draft.shape[1], chunks,
        triton.next_power_of_2(D), triton.next_power_of_2(chunks), num_warps=4,
    )  # fmt: skip
    return out.view(torch.bool)
