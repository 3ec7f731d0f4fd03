"""Attention of groups of masks for a GPU (Triton), forward and backward: models/flex_groups.py says what it computes.

A program takes one group's queries of the heads that share a key head, goes over the tokens that the group sees and
then over the group itself. Tokens are the frozen target's and get no gradient, so that a group's own keys and values
get theirs from this program alone.

N query heads, K key-value heads, M = N / K, D head size, R mask rows, G groups, S masks of a group.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.attention import Heads
from models.fused import LOG2_E, _absorb, store
from models.kernels import HEAD_SIZES

MOST_ROWS = 128  # queries of a program


@triton.jit
def _queries(group, kv, S: tl.constexpr, M: tl.constexpr, BLOCK_M: tl.constexpr):
    """Of a program's rows: mask row, head, place in the group, whether there is one."""
    m = tl.arange(0, BLOCK_M)
    return group.to(tl.int64) * S + m // M, kv * M + m % M, m // M, m < S * M


@triton.jit(do_not_specialize=["window"])
def _forward(
    q, k_own, v_own, k_far, v_far, begins, seen, out, lse, scale, R, window,
    q_head, q_row, ko_head, ko_row, vo_head, vo_row, kf_head, kf_row, vf_head, vf_row,
    S: tl.constexpr, M: tl.constexpr, K: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    group, kv = tl.program_id(0), tl.program_id(1)
    row, head, place, real = _queries(group, kv, S, M, BLOCK_M)
    d, n, s = tl.arange(0, D), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_S)
    begin, end = tl.load(begins + group).to(tl.int64), tl.load(seen + group).to(tl.int32)
    query = tl.load(q + (head * q_head + row * q_row)[:, None] + d[None, :], mask=real[:, None], other=0.0)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, D], tl.float32)
    first = 0
    if WINDOW:
        first = tl.maximum(0, end - window + 1) // BLOCK_N * BLOCK_N
    for start in range(first, end, BLOCK_N):
        token = start + n
        there = token < end
        k = tl.load(
            k_far + kv * kf_head + (begin + token)[:, None] * kf_row + d[None, :], mask=there[:, None], other=0.0
        )
        v = tl.load(
            v_far + kv * vf_head + (begin + token)[:, None] * vf_row + d[None, :], mask=there[:, None], other=0.0
        )
        sees = there[None, :] & real[:, None]
        if WINDOW:
            sees = sees & (end + place[:, None] - token[None, :] < window)
        score = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
        best, mass, mixed = _absorb(tl.where(sees, score, float("-inf")), v, best, mass, mixed)
    own = group.to(tl.int64) * S + s
    k = tl.load(k_own + kv * ko_head + own[:, None] * ko_row + d[None, :], mask=(s < S)[:, None], other=0.0)
    v = tl.load(v_own + kv * vo_head + own[:, None] * vo_row + d[None, :], mask=(s < S)[:, None], other=0.0)
    score = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
    best, mass, mixed = _absorb(tl.where((s < S)[None, :], score, float("-inf")), v, best, mass, mixed)
    mixed = mixed / mass[:, None]
    to = (row * (K * M) + head)[:, None] * D + d[None, :]
    tl.store(out + to, mixed.to(out.dtype.element_ty), mask=real[:, None])
    tl.store(lse + head.to(tl.int64) * R + row, best + tl.log2(mass), mask=real)


@triton.jit
def _slopes(query, k, v, grad, total, whole, sees, scale):
    """(probabilities, gradient of the scores before their scale) of a block of keys."""
    score = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
    p = tl.where(sees, tl.exp2(score - total[:, None]), 0.0)
    return p, p * (tl.dot(grad, tl.trans(v), input_precision="ieee") - whole[:, None])


@triton.jit(do_not_specialize=["window"])
def _backward(
    q, k_own, v_own, k_far, v_far, begins, seen, out, lse, grads, dq, dk, dv, scale, plain_scale, R, window,
    q_head, q_row, ko_head, ko_row, vo_head, vo_row, kf_head, kf_row, vf_head, vf_row,
    S: tl.constexpr, M: tl.constexpr, K: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    group, kv = tl.program_id(0), tl.program_id(1)
    row, head, place, real = _queries(group, kv, S, M, BLOCK_M)
    d, n, s = tl.arange(0, D), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_S)
    begin, end = tl.load(begins + group).to(tl.int64), tl.load(seen + group).to(tl.int32)
    query = tl.load(q + (head * q_head + row * q_row)[:, None] + d[None, :], mask=real[:, None], other=0.0)
    at = (row * (K * M) + head)[:, None] * D + d[None, :]
    grad = tl.load(grads + at, mask=real[:, None], other=0.0)
    said = tl.load(out + at, mask=real[:, None], other=0.0)
    total = tl.load(lse + head.to(tl.int64) * R + row, mask=real, other=0.0)
    whole = tl.sum(grad.to(tl.float32) * said.to(tl.float32), 1)
    back = tl.zeros([BLOCK_M, D], tl.float32)
    first = 0
    if WINDOW:
        first = tl.maximum(0, end - window + 1) // BLOCK_N * BLOCK_N
    for start in range(first, end, BLOCK_N):
        token = start + n
        there = token < end
        k = tl.load(
            k_far + kv * kf_head + (begin + token)[:, None] * kf_row + d[None, :], mask=there[:, None], other=0.0
        )
        v = tl.load(
            v_far + kv * vf_head + (begin + token)[:, None] * vf_row + d[None, :], mask=there[:, None], other=0.0
        )
        sees = there[None, :] & real[:, None]
        if WINDOW:
            sees = sees & (end + place[:, None] - token[None, :] < window)
        _, slope = _slopes(query, k, v, grad, total, whole, sees, scale)
        back = tl.dot(slope.to(k.dtype), k, back, input_precision="ieee")
    own = group.to(tl.int64) * S + s
    k = tl.load(k_own + kv * ko_head + own[:, None] * ko_row + d[None, :], mask=(s < S)[:, None], other=0.0)
    v = tl.load(v_own + kv * vo_head + own[:, None] * vo_row + d[None, :], mask=(s < S)[:, None], other=0.0)
    p, slope = _slopes(query, k, v, grad, total, whole, (s < S)[None, :] & real[:, None], scale)
    back = tl.dot(slope.to(k.dtype), k, back, input_precision="ieee") * plain_scale
    tl.store(dq + at, back.to(dq.dtype.element_ty), mask=real[:, None])
    dkey = tl.dot(tl.trans(slope.to(query.dtype)), query, input_precision="ieee") * plain_scale
    dvalue = tl.dot(tl.trans(p.to(grad.dtype)), grad, input_precision="ieee")
    to = (own * K + kv)[:, None] * D + d[None, :]
    tl.store(dk + to, dkey.to(dk.dtype.element_ty), mask=(s < S)[:, None])
    tl.store(dv + to, dvalue.to(dv.dtype.element_ty), mask=(s < S)[:, None])


def serves(q_NRD: Tensor, keys: int, size: int) -> bool:
    """Whether the kernels are for these masks, of `size` a group; `keys` heads of them."""
    N, _, D = q_NRD.shape
    return D in HEAD_SIZES and size * N // keys <= MOST_ROWS and q_NRD.dtype != torch.float64


def attend(
    q_NRD: Tensor,
    own: tuple[Tensor, Tensor],
    far: tuple[Tensor, Tensor],
    begins_G: Tensor,
    seen_G: Tensor,
    size: int,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """[R, N*D]. `own`: the masks' keys and values [K, R, D]; `far`: those of the tokens [K, T, D], of which group g
    sees `seen[g]` from row `begins[g]` on."""
    out: Tensor = _Groups.apply(q_NRD, *own, *far, begins_G, seen_G, size, scale, window)
    return out


class _Groups(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k_own: Tensor, v_own: Tensor, k_far: Tensor, v_far: Tensor, begins: Tensor, seen: Tensor,
        size: int, scale: float, window: int | None,
    ) -> Tensor:  # fmt: skip
        (N, R, D), K = q.shape, k_own.shape[0]
        read = [t if t.stride(-1) == 1 else t.contiguous() for t in (q, k_own, v_own, k_far, v_far)]
        out = torch.empty(R, N * D, dtype=q.dtype, device=q.device)
        lse = torch.empty(N, R, dtype=torch.float32, device=q.device)
        strides = [stride for t in read for stride in t.stride()[:2]]
        shape, tuned = _plan(size, N // K, K, D, q.dtype, window)
        _forward[(len(begins), K)](
            *read, begins, seen, out, lse, scale * LOG2_E, R, window or 0, *strides, *shape, **tuned
        )
        ctx.save_for_backward(*read, begins, seen, out, lse)
        ctx.size, ctx.scale, ctx.window = size, scale, window
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *read, begins, seen, out, lse = ctx.saved_tensors
        q, k_own = read[:2]
        (N, R, D), K = q.shape, k_own.shape[0]
        dq = torch.empty(R, N, D, dtype=q.dtype, device=q.device)
        dk, dv = (torch.empty(R, K, D, dtype=q.dtype, device=q.device) for _ in range(2))
        strides = [stride for t in read for stride in t.stride()[:2]]
        shape, tuned = _plan(ctx.size, N // K, K, D, q.dtype, ctx.window)
        _backward[(len(begins), K)](
            *read, begins, seen, out, lse, grad.contiguous(), dq, dk, dv, ctx.scale * LOG2_E, ctx.scale, R,
            ctx.window or 0, *strides, *shape, **tuned,
        )  # fmt: skip
        dq, dk, dv = (t.transpose(0, 1) for t in (dq, dk, dv))
        return dq, dk, dv, *[None] * 7


def behind(
    qkv_RX: Tensor,
    rope: tuple[Tensor, Tensor],
    places_R: Tensor,
    far: tuple[Tensor, Tensor],
    begins_G: Tensor,
    seen_G: Tensor,
    size: int,
    heads: Heads,
) -> Tensor:
    """Decoding: projections of all groups' masks at these places, normed, rotated and attended [R, N*D]. `far`: keys
    and values of a cache [B, K, capacity, D]; group g sees `seen[g]` slots from `begins[g]` on, counted in slots of one
    head."""
    R, (N, K, D) = len(qkv_RX), (heads.queries, heads.keys, heads.size)
    keys, values = (qkv_RX.new_empty(1, K, R, D) for _ in range(2))
    nothing = torch.zeros(1, dtype=torch.int64, device=qkv_RX.device)
    queries = store(qkv_RX.unsqueeze(0), rope, places_R, nothing, (keys, values), 0, heads)
    out, lse = torch.empty_like(queries[0]), torch.empty(N, R, dtype=torch.float32, device=qkv_RX.device)
    strides = (D, N * D, *[R * D, D] * 2, *[far[0].stride(1), D] * 2)
    shape, tuned = _plan(size, N // K, K, D, qkv_RX.dtype, None)
    read = (queries, keys, values, *far, begins_G, seen_G)
    _forward[(len(begins_G), K)](*read, out, lse, heads.scale * LOG2_E, R, 0, *strides, *shape, **tuned)
    return out


def _plan(
    size: int, times: int, keys: int, D: int, dtype: torch.dtype, window: int | None
) -> tuple[tuple[Any, ...], dict[str, int]]:
    """The kernels' constants, and how they are launched."""
    block_m = max(16, triton.next_power_of_2(size * times))
    block_n = 32 if D > 128 or dtype == torch.float32 else 64
    block_s = max(16, triton.next_power_of_2(size))
    warps = 8 if block_m * D > 64 * 128 else 4
    shape = (size, times, keys, D, window is not None, block_m, block_n, block_s)
    return shape, {"num_warps": warps, "num_stages": 2}
