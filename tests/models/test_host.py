"""A CPU's decoding kernels against the plain functions."""

import pytest
import torch
import torch.nn.functional as F

from models import host
from models.attention import Heads, attend, rotate
from models.cache import KVCache

ROPE = torch.outer(torch.arange(1000.0), torch.arange(1, 9) / 8)


@pytest.mark.parametrize("T", [1, 3, 4, 11])
@pytest.mark.parametrize("lengths", [[5, 200], [0, 33]])
@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("shape", ["line", "level", "tree"])
def test_attention_norms_rotates_stores_and_attends(
    T: int, lengths: list[int], size: int, normed: bool, shape: str
) -> None:
    source = torch.Generator().manual_seed(T)
    B, N, K, before = 2, 6, 2, 0 if shape == "line" else 5
    cache, plain = (KVCache(2, B, K, 256, size, torch.device("cpu"), torch.float32) for _ in range(2))
    cache.keys.normal_(generator=source)
    cache.values.normal_(generator=source)
    for name in ("keys", "values"):
        getattr(plain, name).copy_(getattr(cache, name))
    cache.set_lengths(lengths)
    plain.set_lengths(lengths)
    qkv = torch.randn(B, T, (N + 2 * K) * size, generator=source)
    cos, sin = (ROPE.repeat(1, size // 8).contiguous().cos(), ROPE.repeat(1, size // 8).contiguous().sin())
    gains = [torch.rand(size, generator=source) + 0.5 for _ in range(2)] if normed else [None, None]
    depth = torch.randint(0, 3, (B, T), generator=source)
    places = {"line": torch.arange(T).expand(B, T), "level": torch.full((B, T), 4), "tree": depth}
    seen = torch.rand(B, T, before + T, generator=source) < 0.4
    seen[:, torch.arange(T), before + torch.arange(T)] = True
    if shape == "line":
        seen = torch.ones(T, T, dtype=torch.bool).tril().expand(B, T, T)

    heads = Heads(N, K, size, size**-0.5, 1e-6, *gains)
    given = {"line": None, "level": 4, "tree": depth}[shape]
    ancestors = None if shape == "line" else seen.to(torch.uint8).contiguous()
    found = host.attention(qkv, (cos, sin), given, cache, 1, heads, ancestors)

    q, k, v = qkv.view(B, T, N + 2 * K, size).transpose(1, 2).split([N, K, K], 1)
    if normed:
        q, k = (F.rms_norm(x, (size,), gain, 1e-6) for x, gain in zip((q, k), gains, strict=True))
    at = plain.lengths.unsqueeze(1) + places[shape]
    q, k = rotate(q, cos[at], sin[at]), rotate(k, cos[at], sin[at])
    keys, values = plain.write(1, k, v, before)
    expected = attend(q, keys, values, plain.visible(seen), heads.scale)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(cache.keys, plain.keys, atol=1e-5, rtol=1e-5)
    assert torch.equal(cache.values, plain.values)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("size", [576, 41])
def test_norms_and_gates(rows: int, size: int) -> None:
    x, delta, gain = torch.randn(rows, size), torch.randn(rows, size), torch.rand(size)
    total, out = host.add_norm(x, delta, gain, 1e-5)
    assert torch.equal(total, x + delta)
    torch.testing.assert_close(out, F.rms_norm(x + delta, (size,), gain, 1e-5))
    same, out = host.add_norm(x, None, gain, 1e-5)
    assert same is x
    torch.testing.assert_close(out, F.rms_norm(x, (size,), gain, 1e-5))
    both = 30 * torch.randn(rows, 2 * size)
    gate, up = both.chunk(2, -1)
    torch.testing.assert_close(host.gated(both), F.silu(gate) * up)
