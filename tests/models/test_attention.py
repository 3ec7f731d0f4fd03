"""The attention primitive against plain loops."""

import itertools
import math
from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.attention import Documents, attend, attend_documents
from models.unroll_attention import Asking, causal_plus_diagonals, reference_causal_plus_diagonals

CPU = torch.device("cpu")


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def by_loops(q: Tensor, k: Tensor, v: Tensor, diagonals: list[tuple[Tensor, Tensor]], lengths: Sequence[int]) -> Tensor:
    """[N, T, D], key heads shared by N / K query heads; every document from its own first token."""
    N, T, D = q.shape
    first = [start for start, n in zip(accumulate(lengths, initial=0), lengths, strict=False) for _ in range(n)]
    out = torch.zeros_like(q)
    for n in range(N):
        shared = n // (N // len(k))
        for p in range(T):
            keys = [k[shared, s] for s in range(first[p], p + 1)] + [key[shared, p] for key, _ in diagonals]
            values = [v[shared, s] for s in range(first[p], p + 1)] + [value[shared, p] for _, value in diagonals]
            weights = torch.stack([q[n, p] @ key / math.sqrt(D) for key in keys]).softmax(0)
            out[n, p] = (weights.unsqueeze(1) * torch.stack(values)).sum(0)
    return out


def gradients(out: Tensor, weight: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad((out * weight).sum(), leaves)


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    heads=st.sampled_from([(1, 1), (3, 3), (4, 2), (6, 2), (4, 1)]),
    steps=st.integers(0, 6),
    seed=st.integers(0, 1000),
)
def test_the_merged_softmax_and_all_gradients_equal_the_reference(
    lengths: list[int], heads: tuple[int, int], steps: int, seed: int
) -> None:
    torch.manual_seed(seed)
    (N, K), T, D = heads, sum(lengths), 8
    q, k, v = draw(N, T, D), draw(K, T, D), draw(K, T, D)
    diagonals = [(draw(K, T, D), draw(K, T, D)) for _ in range(steps)]
    leaves, weight = [q, k, v, *(t for pair in diagonals for t in pair)], torch.randn(N, T, D)
    documents = Documents(lengths, CPU)
    ours = causal_plus_diagonals(q, k, v, diagonals, documents)
    reference = reference_causal_plus_diagonals(q, k, v, diagonals, documents)
    torch.testing.assert_close(ours, reference, atol=1e-5, rtol=1e-5)
    for one, other in zip(gradients(ours, weight, leaves), gradients(reference, weight, leaves), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    heads=st.sampled_from([(1, 1), (4, 2), (4, 1)]),
    shares=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=4),
    squares=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_queries_of_nested_slots_equal_those_of_all(
    lengths: list[int], heads: tuple[int, int], shares: list[float], squares: bool, seed: int
) -> None:
    """Outputs and gradients of the asking slots, laid out as runs or as squares, and the way from a step's slots to the
    next one's."""
    torch.manual_seed(seed)
    (N, K), T, D, documents = heads, sum(lengths), 8, Documents(lengths, CPU)
    sets: list[Tensor] = []
    slots = torch.arange(T)
    for share in shares:
        slots = slots[torch.rand(len(slots)) <= share] if share < 1 else slots
        slots = slots if len(slots) else (sets[-1][:1] if sets else torch.zeros(1, dtype=torch.long))
        sets.append(slots)
    q, k, v = draw(N, T, D), draw(K, T, D), draw(K, T, D)
    everywhere = [(draw(K, T, D), draw(K, T, D)) for _ in sets[1:]]
    leaves = [q, k, v, *(t for pair in everywhere for t in pair)]
    for i, asking in enumerate(Asking.nested(sets, documents, squares)):
        assert (asking.square is not None) == squares
        slots = sets[i]
        assert (asking.index_n is None) == (len(slots) == T)
        if i:
            assert torch.equal(sets[i - 1] if asking.kept_n is None else sets[i - 1][asking.kept_n], slots)
        pairs = [(key[:, slots], value[:, slots]) for key, value in everywhere[:i]]
        ours = causal_plus_diagonals(q[:, slots], k, v, pairs, documents, asking)
        whole = reference_causal_plus_diagonals(q, k, v, everywhere[:i], documents)[:, slots]
        again = reference_causal_plus_diagonals(q[:, slots], k, v, pairs, documents, asking)
        torch.testing.assert_close(ours, whole, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(again, whole, atol=1e-5, rtol=1e-5)
        weight, used = torch.randn_like(ours), leaves[: 3 + 2 * i]
        for one, other in zip(gradients(ours, weight, used), gradients(whole, weight, used), strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("lengths", [[6], [1, 4, 2, 1, 3]])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_reference_equals_loops(lengths: list[int], kv_heads: int) -> None:
    torch.manual_seed(0)
    T = sum(lengths)
    q, k, v = (torch.randn(heads, T, 4, dtype=torch.float64) for heads in (4, kv_heads, kv_heads))
    later = torch.randn(3, 2, kv_heads, T, 4, dtype=torch.float64)
    pairs = [(key, value) for key, value in later]
    expected, documents = by_loops(q, k, v, pairs, lengths), Documents(lengths, CPU)
    torch.testing.assert_close(reference_causal_plus_diagonals(q, k, v, pairs, documents), expected)
    torch.testing.assert_close(causal_plus_diagonals(q, k, v, pairs, documents), expected)


def test_any_memory_layout_gives_the_same() -> None:
    """A flash kernel trusts the last stride to be 1; a transposed product makes it something else."""
    torch.manual_seed(0)
    documents = Documents([2, 4], CPU)
    for order in itertools.permutations(range(3)):
        shape = [(3, 6, 8)[axis] for axis in order]
        back = [order.index(axis) for axis in range(3)]
        leaves = [torch.randn(shape).permute(back).requires_grad_() for _ in range(5)]
        q, k, v, key, value = leaves
        ours = causal_plus_diagonals(q, k, v, [(key, value)], documents)
        reference = reference_causal_plus_diagonals(q, k, v, [(key, value)], documents)
        torch.testing.assert_close(ours, reference, atol=1e-5, rtol=1e-5)
        weight = torch.randn_like(ours)
        for one, other in zip(gradients(ours, weight, leaves), gradients(reference, weight, leaves), strict=True):
            torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


def test_large_scores_do_not_overflow() -> None:
    torch.manual_seed(0)
    q, k, v = (draw(1, 5, 8) for _ in range(3))
    hot = (q * 60, k * 60, v, [(k * 90, v)], Documents([5], CPU))
    out = causal_plus_diagonals(*hot)
    torch.testing.assert_close(out, reference_causal_plus_diagonals(*hot), atol=1e-4, rtol=1e-4)
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(out.sum(), [q, k, v]))


def test_a_document_is_its_tokens_their_places_and_offsets() -> None:
    documents = Documents([3, 1, 2], CPU)
    assert documents.positions_T.tolist() == [0, 1, 2, 0, 0, 1]
    assert documents.offsets.tolist() == [0, 3, 4, 6] and documents.offsets.dtype == torch.int32
    assert documents.longest == 3 and [list(range(6))[s] for s in documents.spans] == [[0, 1, 2], [3], [4, 5]]


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_documents_of_a_packed_row_do_not_see_each_other(window: int | None, softcap: float | None) -> None:
    torch.manual_seed(0)
    lengths, N, K, D = [1, 7, 2, 5], 4, 2, 8
    q, k, v = (torch.randn(1, heads, 15, D) for heads in (N, K, K))
    out = attend_documents(q, k, v, Documents(lengths, CPU), window, 0.4, softcap)
    place = torch.tensor([d for d, n in enumerate(lengths) for _ in range(n)])
    back = torch.arange(15).unsqueeze(1) - torch.arange(15)
    mask = (place.unsqueeze(1) == place) & (back >= 0) & (back < (window or 99))
    torch.testing.assert_close(out, attend(q, k, v, mask.unsqueeze(0), 0.4, softcap), atol=1e-5, rtol=1e-5)


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
