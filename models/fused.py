"""Kernels for a GPU (Triton): what a layer does between its matrix products, in a few launches for thirty.

The attention is the shared two-part one: committed keys and the few new tokens' own, each program over a slice of the
keys that the lengths on the device allow, merged by log-sum-exp. So the cost follows the true context, whatever the
cache holds, and one captured step serves every length. `models.attention.attend` is the reference.

B rows, T new tokens, R = B * T, N heads, K key-value heads, D head size, U uncommitted tokens, P splits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.attention import Heads
from models.cache import KVCache

PROGRAMS = 264  # two a multiprocessor of an H100
LEAST_SLICE, LEAST_TILE = 64, 16  # keys and queries of a program
NEAR = 2048  # slots; where there are more, each key is read by few programs (crossover on an H200: 1,400 to 1,750 keys)
LOG2_E = 1.4426950408889634


@triton.jit
def _add_norm(x, delta, gain, total, out, size, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = at < size
    value = tl.load(x + row * size + at, mask=inside, other=0.0)
    if ADD:
        value = value + tl.load(delta + row * size + at, mask=inside, other=0.0)
        tl.store(total + row * size + at, value, mask=inside)
    wide = value.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide) / size + eps)
    scaled = wide * tl.load(gain + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + at, scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gated(gate_up, out, size, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(gate_up + row * 2 * size + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + at, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T", "offset", "depth"])
def _rotate_and_store(
    qkv, cos, sin, depths, lengths, q_gain, k_gain, queries, keys, values, eps, T, capacity, offset, depth, limit,
    N: tl.constexpr, K: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr, PLACE: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    b, t = row // T, row % T
    d = tl.arange(0, D)
    partner = (d + D // 2) % D
    source = qkv + (row * (N + 2 * K) + head) * D
    x = tl.load(source + d).to(tl.float32)
    other = tl.load(source + partner).to(tl.float32)
    if head < N + K:
        if NORM:
            scale = tl.rsqrt(tl.sum(x * x) / D + eps)
            gain = q_gain
            if head >= N:
                gain = k_gain
            x = x * scale * tl.load(gain + d).to(tl.float32)
            other = other * scale * tl.load(gain + partner).to(tl.float32)
        position = tl.load(lengths + b)
        if PLACE == "each":
            position += tl.load(depths + row)
        elif PLACE == "line":
            position += t
        else:
            position += depth
        position = tl.minimum(position, limit)
        other = tl.where(d < D // 2, -other, other)
        x = x * tl.load(cos + position * D + d).to(tl.float32) + other * tl.load(sin + position * D + d).to(tl.float32)
    slot = tl.minimum(tl.load(lengths + b) + offset + t, capacity - 1)
    pair = (b * K + (head - N) % K).to(tl.int64)
    if head < N:
        tl.store(queries + (row * N + head) * D + d, x.to(queries.dtype.element_ty))
    elif head < N + K:
        tl.store(keys + (pair * capacity + slot) * D + d, x.to(keys.dtype.element_ty))
    else:
        tl.store(values + (pair * capacity + slot) * D + d, x.to(values.dtype.element_ty))


@triton.jit
def _absorb(score, v, best, mass, out):
    """Go on with a softmax by its running maximum and mass; scores in powers of two."""
    peak = tl.maximum(best, tl.max(score, 1))
    safe = tl.where(peak == float("-inf"), 0.0, peak)
    p, fade = tl.exp2(score - safe[:, None]), tl.exp2(best - safe)
    out = tl.dot(p.to(v.dtype), v, out * fade[:, None], input_precision="ieee")
    return peak, mass * fade + tl.sum(p, 1), out


@triton.jit(do_not_specialize=["T", "U", "splits"])
def _attend_slice(
    queries, keys, values, lengths, seen, partial, weight, whole, scale, T, U, capacity, splits,
    G: tl.constexpr, K: tl.constexpr, D: tl.constexpr, TREE: tl.constexpr, PEEL: tl.constexpr, ALONE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pair, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, kv = pair // K, pair % K
    length = tl.load(lengths + b)
    total = length + U
    each = tl.cdiv(tl.cdiv(total, splits), BLOCK_N) * BLOCK_N
    start = split * each
    if start >= total:
        return
    end = tl.minimum(start + each, total)
    if not TREE:  # the last of a line's tokens here sees no further
        end = tl.minimum(end, length + (tile * BLOCK_M + BLOCK_M - 1) // G + 1)
    m, d, n = tile * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, D), tl.arange(0, BLOCK_N)
    t, g = m // G, m % G
    real = m < T * G
    q = tl.load(queries + ((b * T + t) * (K * G) + kv * G + g)[:, None] * D + d[None, :], mask=real[:, None], other=0.0)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, D], tl.float32)
    base = pair.to(tl.int64) * capacity * D
    if PEEL:  # the keys that all see, without a mask
        committed = tl.maximum(start, tl.minimum(end, length // BLOCK_N * BLOCK_N))
        for first in range(start, committed, BLOCK_N):
            at = base + (first + n)[:, None] * D + d[None, :]
            score = tl.dot(q, tl.trans(tl.load(keys + at)), input_precision="ieee") * scale
            best, mass, out = _absorb(score, tl.load(values + at), best, mass, out)
        start = committed
    for first in range(start, end, BLOCK_N):
        slot = first + n
        at = base + slot[:, None] * D + d[None, :]
        k = tl.load(keys + at, mask=(slot < end)[:, None], other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        behind = slot - length  # among the uncommitted tokens where not negative
        visible = (slot < end)[None, :] & real[:, None]
        if first + BLOCK_N > length:
            if TREE:
                own = (behind >= 0)[None, :] & visible
                sees = tl.load(seen + (b * T + t)[:, None] * U + behind[None, :], mask=own, other=1)
                visible = visible & (sees != 0)
            else:
                visible = visible & (behind[None, :] <= t[:, None])
        v = tl.load(values + at, mask=(slot < end)[:, None], other=0.0)
        best, mass, out = _absorb(tl.where(visible, score, float("-inf")), v, best, mass, out)
    out = out / tl.where(mass > 0, mass, 1.0)[:, None]
    if ALONE:
        place = ((b * T + t) * (K * G) + kv * G + g)[:, None] * D + d[None, :]
        tl.store(whole + place, out.to(whole.dtype.element_ty), mask=real[:, None])
    else:
        row = (pair * splits + split) * (T * G) + m
        tl.store(partial + row[:, None] * D + d[None, :], out, mask=real[:, None])
        tl.store(weight + row, tl.where(mass > 0, best + tl.log2(mass), float("-inf")), mask=real)


@triton.jit(do_not_specialize=["T", "U", "splits"])
def _merge(
    partial, weight, lengths, out, T, U, splits, G: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pair, m = tl.program_id(0), tl.program_id(1)
    b, kv, t, g = pair // K, pair % K, m // G, m % G
    s, d = tl.arange(0, SPLITS), tl.arange(0, D)
    row = (pair * splits + s) * (T * G) + m
    total = tl.load(lengths + b) + U
    used = s * (tl.cdiv(tl.cdiv(total, splits), BLOCK_N) * BLOCK_N) < total  # the slices that had keys
    lse = tl.load(weight + row, mask=used, other=float("-inf"))
    share = tl.exp2(lse - tl.max(lse))
    parts = tl.load(partial + row[:, None] * D + d[None, :], mask=used[:, None], other=0.0)
    mixed = tl.sum(parts * share[:, None], 0) / tl.sum(share)
    tl.store(out + ((b * T + t) * (K * G) + kv * G + g) * D + d, mixed.to(out.dtype.element_ty))


def store(
    qkv_BTX: Tensor,
    rope: tuple[Tensor, Tensor],
    depths: Tensor | int | None,
    lengths_B: Tensor,
    into: tuple[Tensor, Tensor],
    offset: int,
    heads: Heads,
) -> Tensor:
    """Norm and rotate; keys and values go `into` [B, K, capacity, D], `offset` slots behind the committed ones. Returns
    the queries [B, T, N*D]."""
    B, T, _ = qkv_BTX.shape
    N, K, D = heads.queries, heads.keys, heads.size
    queries = qkv_BTX.new_empty(B, T, N * D)
    none, place = qkv_BTX, "line" if depths is None else "all" if isinstance(depths, int) else "each"
    q_gain, k_gain = (none if gain is None else gain for gain in (heads.q_gain, heads.k_gain))
    _rotate_and_store[(B * T, N + 2 * K)](
        qkv_BTX, *rope, depths if place == "each" else none, lengths_B, q_gain, k_gain, queries, *into,
        heads.eps, T, into[0].shape[2], offset,
        depths if place == "all" else 0, len(rope[0]) - 1, N, K, D, heads.q_gain is not None, place, num_warps=1,
    )  # fmt: skip
    return queries


def attention(
    qkv_BTX: Tensor,
    rope: tuple[Tensor, Tensor],
    depths: Tensor | int | None,
    cache: KVCache,
    layer: int,
    heads: Heads,
    ancestors_BTU: Tensor | None,
) -> Tensor:
    """Norm, rotate, store and attend -> [B, T, N*D].

    `rope`: the tables of cosines and sines [positions, D]. The T tokens are the last of the U uncommitted ones of
    `ancestors` (uint8), `depths` behind the committed ones ([B, T], or one for all); without either they are a line.
    """
    B, T, _ = qkv_BTX.shape
    N, K, D = heads.queries, heads.keys, heads.size
    U = T if ancestors_BTU is None else ancestors_BTU.shape[2]
    keys, values, capacity = cache.keys[layer], cache.values[layer], cache.capacity
    queries = store(qkv_BTX, rope, depths, cache.lengths, (keys, values), U - T, heads)
    none, G = qkv_BTX, N // K
    small = qkv_BTX.dtype == torch.float32 or D > 128
    block_m = min(64 if small else 128, max(LEAST_TILE, triton.next_power_of_2(T * G)))
    if capacity <= NEAR and B * K * triton.cdiv(T * G, LEAST_TILE) <= PROGRAMS:
        block_m = LEAST_TILE  # many small programs are done sooner than few large ones
    block_n, wide = 32 if D > 128 else 64, block_m > 64
    tiles = triton.cdiv(T * G, block_m)
    splits = max(1, min(32, triton.cdiv(PROGRAMS, B * K * tiles), triton.cdiv(capacity, LEAST_SLICE)))
    out, alone = torch.empty_like(queries), splits == 1
    pieces = 0 if alone else B * K * splits * T * G
    parts, weight = (torch.empty(pieces, size, dtype=torch.float32, device=out.device) for size in (D, 1))
    seen = none if ancestors_BTU is None else ancestors_BTU
    _attend_slice[(B * K, tiles, splits)](
        queries, keys, values, cache.lengths, seen, parts, weight, out, heads.scale * LOG2_E, T, U, capacity, splits,
        G, K, D, ancestors_BTU is not None, wide, alone, block_m, block_n, num_warps=8 if wide else 4, num_stages=2,
    )  # fmt: skip
    if alone:
        return out
    most = triton.next_power_of_2(splits)
    _merge[(B * K, T * G)](
        parts, weight, cache.lengths, out, T, U, splits, G, K, D, most, block_n, num_warps=2
    )  # fmt: skip
    return out


@triton.jit
def _keep(keys, values, lengths, path, B, K, capacity, size, steps, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr):
    place, head = tl.program_id(0), tl.program_id(1)  # of (layer, row)
    b, s, d = place % B, tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    length = tl.load(lengths + b)
    inside = (s < steps)[:, None] & (d < size)[None, :]
    base = (place.to(tl.int64) * K + head) * capacity
    source = tl.minimum(length + tl.load(path + b * steps + s, mask=s < steps, other=0), capacity - 1)
    into = tl.minimum(length + s, capacity - 1)
    source, into = (base + source)[:, None] * size + d[None, :], (base + into)[:, None] * size + d[None, :]
    k, v = tl.load(keys + source, mask=inside), tl.load(values + source, mask=inside)
    tl.debug_barrier()  # a path's slots are written over by other threads
    tl.store(keys + into, k, mask=inside)
    tl.store(values + into, v, mask=inside)


def keep(keys: Tensor, values: Tensor, lengths_B: Tensor, path_BS: Tensor) -> None:
    """Move the slots of a path behind each row's committed ones to the front of them, in all layers of a cache
    [layers, B, K, capacity, D]."""
    layers, B, K, capacity, D = keys.shape
    path, steps = path_BS.contiguous(), path_BS.shape[1]
    blocks = triton.next_power_of_2(steps), triton.next_power_of_2(D)
    _keep[(layers * B, K)](keys, values, lengths_B, path, B, K, capacity, D, steps, *blocks, num_warps=4)


def add_norm(x: Tensor, delta: Tensor | None, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + delta, its RMS norm times `gain`) [..., H]; without `delta` x itself."""
    size = x.shape[-1]
    total, out = x if delta is None else torch.empty_like(x), torch.empty_like(x)
    block = triton.next_power_of_2(size)
    _add_norm[(x.numel() // size,)](
        x, x if delta is None else delta, gain, total, out, size, eps, delta is not None, block,
        num_warps=max(1, min(8, block // 256)),
    )  # fmt: skip
    return total, out


def gated(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [..., 2I] -> [..., I]."""
    size = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], size)
    _gated[(gate_up.numel() // (2 * size), triton.cdiv(size, 1024))](gate_up, out, size, 1024, num_warps=4)
    return out
