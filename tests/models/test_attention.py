"""The attention primitive against plain loops."""

import math

import pytest
import torch
from torch import Tensor

from models.attention import attend, causal_plus_diagonals, reference_causal_plus_diagonals


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def by_loops(q: Tensor, k: Tensor, v: Tensor, diagonals: list[tuple[Tensor, Tensor]]) -> Tensor:
    B, N, T, D = q.shape
    out = torch.zeros_like(q)
    for b in range(B):
        for n in range(N):
            for p in range(T):
                keys = [k[b, n, s] for s in range(p + 1)] + [key[b, n, p] for key, _ in diagonals]
                values = [v[b, n, s] for s in range(p + 1)] + [value[b, n, p] for _, value in diagonals]
                weights = torch.stack([q[b, n, p] @ key / math.sqrt(D) for key in keys]).softmax(0)
                out[b, n, p] = (weights.unsqueeze(1) * torch.stack(values)).sum(0)
    return out


@pytest.mark.parametrize("steps", [0, 1, 2, 6])
@pytest.mark.parametrize("shape", [(2, 3, 17, 16), (1, 2, 1, 8), (1, 1, 70, 8)])
def test_the_merged_softmax_and_all_gradients_equal_the_reference(steps: int, shape: tuple[int, ...]) -> None:
    torch.manual_seed(steps)
    q, k, v = draw(*shape), draw(*shape), draw(*shape)
    diagonals = [(draw(*shape), draw(*shape)) for _ in range(steps)]
    leaves = [q, k, v, *(t for pair in diagonals for t in pair)]
    weight = torch.randn(shape)
    ours, reference = causal_plus_diagonals(q, k, v, diagonals), reference_causal_plus_diagonals(q, k, v, diagonals)
    torch.testing.assert_close(ours, reference, atol=1e-5, rtol=1e-5)
    ours_grads = torch.autograd.grad((ours * weight).sum(), leaves)
    reference_grads = torch.autograd.grad((reference * weight).sum(), leaves)
    for one, other in zip(ours_grads, reference_grads, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


def test_the_reference_equals_loops() -> None:
    torch.manual_seed(0)
    shape = (2, 2, 6, 4)
    q, k, v = (torch.randn(shape, dtype=torch.float64) for _ in range(3))
    diagonals = [(torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)) for _ in range(3)]
    expected = by_loops(q, k, v, diagonals)
    torch.testing.assert_close(reference_causal_plus_diagonals(q, k, v, diagonals), expected)
    torch.testing.assert_close(causal_plus_diagonals(q, k, v, diagonals), expected)


def test_any_memory_layout_gives_the_same() -> None:
    """A flash kernel trusts the last stride to be 1; a transposed product makes it something else."""
    torch.manual_seed(0)
    for order in ((0, 1, 2, 3), (0, 2, 1, 3), (3, 0, 1, 2), (2, 3, 0, 1)):
        shape = [(2, 3, 6, 8)[axis] for axis in order]
        back = [order.index(axis) for axis in range(4)]
        q, k, v, key, value = (torch.randn(shape).permute(back).requires_grad_() for _ in range(5))
        ours = causal_plus_diagonals(q, k, v, [(key, value)])
        reference = reference_causal_plus_diagonals(q, k, v, [(key, value)])
        torch.testing.assert_close(ours, reference, atol=1e-5, rtol=1e-5)
        weight = torch.randn_like(ours)
        for one, other in zip(
            torch.autograd.grad((ours * weight).sum(), [q, k, v, key, value]),
            torch.autograd.grad((reference * weight).sum(), [q, k, v, key, value]),
            strict=True,
        ):
            torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


def test_large_scores_do_not_overflow() -> None:
    torch.manual_seed(0)
    q, k, v = (draw(1, 1, 5, 8) for _ in range(3))
    hot = (q * 60, k * 60, v, [(k * 90, v)])
    out = causal_plus_diagonals(*hot)
    torch.testing.assert_close(out, reference_causal_plus_diagonals(*hot), atol=1e-4, rtol=1e-4)
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(out.sum(), [q, k, v]))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("masked", [True, False])
def test_attend_equals_a_plain_loop_over_heads(kv_heads: int, softcap: float | None, masked: bool) -> None:
    torch.manual_seed(kv_heads)
    B, N, T, D, scale = 2, 4, 5, 8, 0.4
    S = 9 if masked else T
    q, k, v = torch.randn(B, N, T, D), torch.randn(B, kv_heads, S, D), torch.randn(B, kv_heads, S, D)
    mask = torch.rand(B, T, S) < 0.5 if masked else torch.ones(T, T).tril().bool().expand(B, T, T)
    if masked:
        mask[:, :, 0] = True
    out = attend(q, k, v, mask if masked else None, scale, softcap)
    assert out.shape == (B, T, N * D)
    for b in range(B):
        for n in range(N):
            for t in range(T):
                seen = mask[b, t].nonzero().flatten()
                scores = k[b, n // (N // kv_heads), seen] @ q[b, n, t] * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                expected = scores.softmax(0) @ v[b, n // (N // kv_heads), seen]
                torch.testing.assert_close(out[b, t, n * D : (n + 1) * D], expected, atol=1e-5, rtol=1e-5)
