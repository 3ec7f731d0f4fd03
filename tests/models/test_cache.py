"""The static cache: what is committed, what a new token may see, and the two ways of writing."""

import torch
from torch import Tensor

from models.cache import KVCache


def make(rows: int, capacity: int = 16, layers: int = 2) -> KVCache:
    return KVCache(layers, rows, 2, capacity, 4, torch.device("cpu"), torch.float32)


def tokens(rows: int, count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 2, count, 4), torch.randn(rows, 2, count, 4)


def write(cache: KVCache, count: int, offset: int = 0) -> tuple[Tensor, Tensor]:
    k, v = tokens(cache.rows, count)
    for layer in range(len(cache.keys)):
        cache.write(layer, k + layer, v + layer, offset)
    return k, v


def test_slice_and_index_writes_store_the_same() -> None:
    by_slice, by_index = make(2), make(2)
    by_index.bucket = 16
    for cache in (by_slice, by_index):
        torch.manual_seed(0)
        cache.set_lengths([3, 3])
        k, v = tokens(2, 4)
        read_k, read_v = cache.write(1, k, v, offset=2)
        assert read_k.shape[2] == cache.span(6) >= 9
        assert torch.equal(read_k[:, :, 5:9], k) and torch.equal(read_v[:, :, 5:9], v)
    assert torch.equal(by_slice.keys, by_index.keys) and torch.equal(by_slice.values, by_index.values)
    assert by_slice.uniform and not by_index.uniform


def test_ragged_rows_write_behind_their_own_length() -> None:
    cache = make(3)
    cache.set_lengths([5, 0, 2])
    k, _ = tokens(3, 3)
    cache.write(0, k, k)
    for row, length in enumerate([5, 0, 2]):
        assert torch.equal(cache.keys[0, row, :, length : length + 3], k[row])
        assert not cache.keys[0, row, :, length + 3 :].any()
    assert cache.lengths.tolist() == [5, 0, 2] == cache.host


def test_a_span_covers_what_is_there_and_never_exceeds_the_capacity() -> None:
    cache = make(2, capacity=40)
    for high, new in ((0, 1), (3, 6), (16, 0), (30, 10), (cache.capacity - 1, 1)):
        cache.set_lengths([0, high])
        assert high + new <= cache.span(new) <= cache.capacity


def test_keep_commits_the_first_tokens_of_each_row() -> None:
    cache = make(2)
    k, _ = write(cache, 4)
    cache.keep(torch.tensor([3, 1]), [3, 1])
    assert cache.lengths.tolist() == [3, 1] == cache.host and cache.high == 3
    assert torch.equal(cache.keys[1, 0, :, :3], k[0, :, :3] + 1)


def test_keep_moves_the_nodes_of_a_path_together() -> None:
    cache = make(2)
    cache.set_lengths([2, 5])
    k, v = write(cache, 6)
    path = torch.tensor([[0, 2, 5], [0, 4, 4]])
    cache.keep(torch.tensor([3, 2]), [3, 2], path)
    assert cache.lengths.tolist() == [5, 7] == cache.host
    for layer in range(2):
        assert torch.equal(cache.keys[layer, 0, :, 2:5], k[0][:, [0, 2, 5]] + layer)
        assert torch.equal(cache.values[layer, 0, :, 2:5], v[0][:, [0, 2, 5]] + layer)
        assert torch.equal(cache.keys[layer, 1, :, 5:7], k[1][:, [0, 4]] + layer)


def test_keep_of_no_token_leaves_a_finished_row_alone() -> None:
    cache = make(2)
    write(cache, 3)
    cache.keep(torch.tensor([2, 2]), [2, 2])
    before = cache.keys[:, 1, :, :2].clone()
    write(cache, 3)
    cache.keep(torch.tensor([2, 0]), [2, 0], torch.tensor([[0, 2], [0, 1]]))
    assert cache.lengths.tolist() == [4, 2] == cache.host
    assert torch.equal(cache.keys[:, 1, :, :2], before)


def test_adopt_takes_committed_slots_into_chosen_rows() -> None:
    big, small = make(4), make(2, capacity=6)
    big.set_lengths([7, 1, 2, 3])
    write(small, 5)
    small.set_lengths([5, 3])
    big.adopt([3, 1], small)
    assert big.lengths.tolist() == [7, 3, 2, 5] == big.host
    assert torch.equal(big.keys[:, 3, :, :5], small.keys[:, 0, :, :5])
    assert torch.equal(big.values[:, 1, :, :3], small.values[:, 1, :, :3])


def test_visible_shows_all_committed_slots_and_the_allowed_new_ones() -> None:
    torch.manual_seed(0)
    cache = make(3)
    lengths = [0, 4, 2]
    cache.set_lengths(lengths)
    ancestors = torch.rand(3, 2, 5) < 0.5  # two queries among five uncommitted tokens
    seen = cache.visible(ancestors)
    assert seen.shape == (3, 2, cache.span(5)) and cache.span(5) >= 9
    for row, length in enumerate(lengths):
        for t in range(2):
            for slot in range(cache.span(5)):
                new = slot - length
                expected = True if new < 0 else bool(ancestors[row, t, new]) if new < 5 else False
                assert bool(seen[row, t, slot]) == expected


def test_positions_number_committed_slots_and_new_tokens() -> None:
    cache = make(2)
    cache.set_lengths([3, 1])
    positions = cache.positions(torch.tensor([[3, 4, 4], [1, 2, 2]]))
    assert positions.shape == (2, cache.span(3))
    assert positions[0, :6].tolist() == [0, 1, 2, 3, 4, 4]
    assert positions[1, :4].tolist() == [0, 1, 2, 2]
