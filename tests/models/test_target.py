"""Every family against transformers: the layer numbering, cached continuation, and verification of a tree."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from models.attention import Documents
from models.target import States, Target

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")
TREE = [-1, 0, 0, 1, 1, 2, 3, 6, 7, 8, 9, 10]  # parents: deeper than the sliding window of 8


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, atol=2e-4, rtol=2e-4)


@pytest.fixture(scope="module", params=FAMILIES)
def target(request: pytest.FixtureRequest, tiny_target: Callable[..., Any]) -> Target:
    found: Target = tiny_target(request.param, taps=list(range(8)))
    return found


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(2, 320, (2, 26), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def reference(target: Target, ids_BT: Tensor) -> Any:
    return target.model(ids_BT, attention_mask=torch.ones_like(ids_BT), output_hidden_states=True, use_cache=False)


def test_h_L_is_the_hidden_states_tuple_of_transformers(target: Target, ids: Tensor) -> None:
    states, expected = target.features(ids), reference(target, ids)
    H = target.hidden_size
    assert states.taps_BTC.shape == (2, 26, 8 * H)
    for depth in range(8):
        close(states.taps_BTC[..., depth * H : (depth + 1) * H], expected.hidden_states[depth])
    close(states.final_BTH, expected.hidden_states[-1])  # the last entry of the tuple is normed
    close(target.logits(states.final_BTH), expected.logits)


def test_rows_of_the_head_give_their_logits_alone(target: Target, ids: Tensor) -> None:
    final = target.features(ids[:, :5]).final_BTH
    kept = torch.tensor([7, 3, 300])
    close(target.logits(final, target.head_weight[kept]), target.logits(final)[..., kept])


def test_a_ragged_cache_continues_as_one_pass_would(target: Target, ids: Tensor) -> None:
    expected = reference(target, ids).logits
    cache = target.new_cache(2, 40)
    last = target.logits(target.prefill(ids[:, :15], [15, 11], cache).final_BTH)
    assert last.shape == (2, 1, 320)
    close(last[0, 0], expected[0, 14])
    close(last[1, 0], expected[1, 10])
    at = [15, 11]
    for count in (5, 1, 3):
        new = torch.stack([ids[row, start : start + count] for row, start in enumerate(at)])
        out = target.logits(target.forward(new, cache).final_BTH)
        for row, start in enumerate(at):
            close(out[row], expected[row, start : start + count])
        cache.keep(torch.tensor([count, count]), [count, count])
        at = [start + count for start in at]


@pytest.mark.parametrize("limit", [{"PREFILL_CHUNK": 6}, {"PREFILL_CELLS": 6 * 2 * 20}, {}])
def test_prefill_in_chunks_changes_nothing(
    target: Target, ids: Tensor, monkeypatch: pytest.MonkeyPatch, limit: dict[str, int]
) -> None:
    for key, value in limit.items():
        monkeypatch.setattr(f"models.target.{key}", value)
    seen: list[tuple[slice, States]] = []
    last = target.prefill(ids[:, :20], [20, 5], target.new_cache(2, 32), lambda *part: seen.append(part))
    assert [(part.start, part.stop) for part, _ in seen] == (
        [(0, 6), (6, 12), (12, 18), (18, 20)] if limit else [(0, 20)]
    )
    whole, expected = target.features(ids[:, :20]), reference(target, ids[:, :20]).logits
    close(target.logits(torch.cat([states.final_BTH for _, states in seen], 1)), expected)
    close(torch.cat([states.taps_BTC for _, states in seen], 1), whole.taps_BTC)
    for row, end in enumerate((20, 5)):
        close(last.taps_BTC[row, 0], whole.taps_BTC[row, end - 1])
        close(target.logits(last.final_BTH[row, 0]), expected[row, end - 1])


def path_to(node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = TREE[node]
    return path


def test_a_tree_verifies_as_plain_passes_over_its_paths(target: Target, ids: Tensor) -> None:
    """Past the sliding window too; then the accepted path is kept and decoding goes on."""
    cache, lengths, N = target.new_cache(2, 64), [13, 9], len(TREE)
    target.prefill(ids[:, :13], lengths, cache)
    nodes = torch.randint(2, 320, (2, N), generator=torch.Generator().manual_seed(4))
    ancestors = torch.zeros(N, N, dtype=torch.bool)
    for node in range(N):
        ancestors[node, path_to(node)] = True
    depths = torch.tensor([[len(path_to(n)) - 1 for n in range(N)]] * 2)
    out = target.logits(target.forward(nodes, cache, depths, ancestors.expand(2, N, N)).final_BTH)
    for row, length in enumerate(lengths):
        for node in range(N):
            plain = torch.cat([ids[row, :length], nodes[row, path_to(node)]]).unsqueeze(0)
            close(out[row, node], reference(target, plain).logits[0, -1])
    accepted = torch.tensor([[0, 1, 3], [0, 2, 2]])
    cache.keep(torch.tensor([3, 2]), [3, 2], accepted)
    out = target.logits(target.forward(torch.tensor([[5], [6]]), cache).final_BTH)
    for row, (length, path) in enumerate(zip(lengths, ([0, 1, 3], [0, 2]), strict=True)):
        plain = torch.cat([ids[row, :length], nodes[row, path], torch.tensor([5 + row])]).unsqueeze(0)
        close(out[row, 0], reference(target, plain).logits[0, -1])


def test_the_embedding_is_the_raw_table(target: Target) -> None:
    picked = torch.tensor([[3, 9]])
    assert torch.equal(target.embed(picked), target.model.get_input_embeddings().weight[picked])


def test_right_padding_is_harmless(target: Target, ids: Tensor) -> None:
    padded = ids.clone()
    padded[1, 20:] = 0
    close(target.features(padded).taps_BTC[1, :20], target.features(ids[1:, :20]).taps_BTC[0])


@pytest.mark.parametrize("lengths", [[26, 1, 2, 14], [1, 1], [9]])
def test_a_packed_document_is_as_it_would_be_alone(target: Target, lengths: list[int]) -> None:
    """Past the sliding window too, for the families that have one."""
    documents = Documents(lengths, target.device)
    ids = torch.randint(2, 320, (sum(lengths),), generator=torch.Generator().manual_seed(5))
    packed = target.packed_features(ids, documents)
    for span in documents.spans:
        alone = target.features(ids[span].unsqueeze(0))
        for one, other in ((packed.taps_BTC, alone.taps_BTC), (packed.final_BTH, alone.final_BTH)):
            assert (one[:, span] - other).abs().max() <= 1e-5 * other.abs().max()
        close(packed.final_BTH[:, span], reference(target, ids[span].unsqueeze(0)).hidden_states[-1])


def test_nothing_of_the_target_takes_gradients(target: Target, ids: Tensor) -> None:
    assert not any(p.requires_grad for p in target.model.parameters())
    assert not target.features(ids[:, :4]).taps_BTC.requires_grad
