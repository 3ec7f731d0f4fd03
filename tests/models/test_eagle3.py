"""The unroll against one full forward a slot and step; decoding against the unroll; where the head starts."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention import Documents
from models.eagle3 import Eagle3, Eagle3Config
from models.target import Target
from models.vocab import VocabMap
from tests.models import naive_eagle
from tests.tiny import tiny_drafter

B, T, STEPS = 2, 9, 7
CPU = torch.device("cpu")


def shape_of(config: Eagle3Config) -> naive_eagle.Shape:
    theta = float(config.rope_parameters["rope_theta"])
    return naive_eagle.Shape(
        config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.rms_norm_eps, theta
    )


class Case:
    """A random drafter on the features of random rows, longer by what the last step looks ahead."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.drafter: Eagle3 = tiny_drafter(target, list(range(0, 320, 2)))
        self.ids = torch.randint(2, 320, (B, T + STEPS), generator=torch.Generator().manual_seed(1))
        self.taps = target.features(self.ids[:, :T]).taps_BTC
        self.shape = shape_of(self.drafter.config)

    def embed(self, i: int) -> Tensor:
        return self.target.embed(self.ids[:, 1 + i : 1 + i + T])

    def unrolled(self) -> list[Tensor]:
        """The rows as the documents of one packed row, [B, T, H] a step; what they look ahead to has no features."""
        documents = Documents([T + STEPS] * B, self.target.device)
        taps, embeds = F.pad(self.taps, (0, 0, 0, STEPS)), self.target.embed(F.pad(self.ids.flatten()[1:], (0, STEPS)))
        steps = self.drafter.unroll(taps.flatten(0, 1), embeds, STEPS, documents)
        return [state.unflatten(0, (B, T + STEPS))[:, :T] for state in steps]

    def naive(self, row: int, slot: int) -> list[Tensor]:
        weights = dict(self.drafter.named_parameters())
        drafted = torch.stack([self.embed(i)[row, slot] for i in range(1, STEPS)])
        return naive_eagle.chain(
            weights, self.shape, self.taps[row, : slot + 1], self.embed(0)[row, : slot + 1], drafted
        )


@pytest.fixture(scope="module")
def case(tiny_target: Callable[..., Any]) -> Case:
    return Case(tiny_target("llama"))


def test_the_unroll_equals_one_full_forward_a_slot_and_step(case: Case) -> None:
    unrolled = case.unrolled()
    assert len(unrolled) == STEPS
    for row in range(B):
        for slot in range(T):
            for i, state in enumerate(case.naive(row, slot)):
                torch.testing.assert_close(unrolled[i][row, slot], state, atol=1e-5, rtol=1e-5)
                expected = naive_eagle.logits(dict(case.drafter.named_parameters()), case.shape, state)
                torch.testing.assert_close(case.drafter.logits(unrolled[i][row, slot]), expected, atol=2e-5, rtol=1e-5)


def test_the_gradients_equal_those_of_the_full_forwards(case: Case) -> None:
    parameters = dict(case.drafter.named_parameters())
    weight = torch.randn(STEPS, B, T, case.drafter.vocab.size, generator=torch.Generator().manual_seed(2)) / 10
    total = torch.stack([(case.drafter.logits(s) * weight[i]).sum() for i, s in enumerate(case.unrolled())]).sum()
    ours = torch.autograd.grad(total, list(parameters.values()))
    parts = []
    for row in range(B):
        for slot in range(T):
            for i, state in enumerate(case.naive(row, slot)):
                parts.append((naive_eagle.logits(parameters, case.shape, state) * weight[i, row, slot]).sum())
    expected = torch.autograd.grad(torch.stack(parts).sum(), list(parameters.values()))
    for name, one, other in zip(parameters, ours, expected, strict=True):
        assert (one - other).norm() <= 1e-4 * other.norm(), name


@pytest.mark.parametrize("lengths", [[1, 7, 2, 1, 12], [2, 1], [30, 1, 1, 9]])
def test_packed_documents_unroll_as_each_alone(case: Case, lengths: list[int]) -> None:
    """States of the slots that look at nothing behind their document, and all gradients of those, exact to 1e-5."""
    drafter, total = case.drafter, sum(lengths)
    draw = torch.Generator().manual_seed(total)
    taps = torch.randn(total, drafter.fc.in_features, generator=draw)
    embeds = torch.randn(total + STEPS, drafter.config.hidden_size, generator=draw)
    weight = torch.randn(STEPS, total, drafter.config.hidden_size, generator=draw) / total
    for start, length in zip(accumulate(lengths, initial=0), lengths, strict=False):
        for i in range(STEPS):
            weight[i, max(start, start + length - 1 - i) : start + length] = 0  # x[p+1+i] lies behind the document

    def unroll(span: slice, documents: Documents) -> list[Tensor]:
        steps = drafter.unroll(taps[span], embeds[span.start + 1 :], STEPS, documents)
        return [state * (weight[i, span] != 0) for i, state in enumerate(steps)]

    packed = torch.stack(unroll(slice(0, total), Documents(lengths, CPU)))
    spans = Documents(lengths, CPU).spans
    alone = torch.cat([torch.stack(unroll(s, Documents([s.stop - s.start], CPU))) for s in spans], 1)
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)
    trained = [p for name, p in drafter.named_parameters() if not name.startswith(("norm", "lm_head"))]
    ours = torch.autograd.grad((packed * weight).sum(), trained)
    for one, other in zip(ours, torch.autograd.grad((alone * weight).sum(), trained), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_the_unroll_is_causal_in_committed_text(case: Case) -> None:
    """A later token moves no earlier slot, at any step: all that slot p sees of the row is x[0 .. p+1+i]."""
    before = case.unrolled()
    spoilt = Case(case.target)
    spoilt.taps = spoilt.taps.clone()
    spoilt.taps[:, 5:] += 1
    for i, state in enumerate(spoilt.unrolled()):
        torch.testing.assert_close(state[:, :5], before[i][:, :5])


def test_a_step_of_decoding_equals_the_unroll(case: Case) -> None:
    """Ragged committed slots, taken up in two parts, then a chain of drafts in the cache."""
    drafter, unrolled, slots = case.drafter, case.unrolled(), [7, 4]
    cache = drafter.new_cache(B, 64)
    states = drafter.step(drafter.fuse(case.taps[:, :3]), case.embed(0)[:, :3], cache)
    torch.testing.assert_close(states, unrolled[0][:, :3], atol=1e-5, rtol=1e-5)
    cache.keep(torch.tensor([3, 3]), [3, 3])
    states = drafter.step(drafter.fuse(case.taps[:, 3:8]), case.embed(0)[:, 3:8], cache)
    torch.testing.assert_close(states, unrolled[0][:, 3:8], atol=1e-5, rtol=1e-5)
    counts = [slot - 2 for slot in slots]
    cache.keep(torch.tensor(counts), counts)
    rows = torch.arange(B)
    state = states[rows, torch.tensor(counts) - 1].unsqueeze(1)
    for i in range(1, STEPS):
        embeds = case.embed(i)[rows, torch.tensor(slots)].unsqueeze(1)
        state = drafter.step(state, embeds, cache, i - 1, torch.ones(B, 1, i, dtype=torch.bool))
        torch.testing.assert_close(state[:, 0], unrolled[i][rows, torch.tensor(slots)], atol=1e-5, rtol=1e-5)


def test_packed_weights_keep_their_place_and_follow_the_drafters(tiny_target: Callable[..., Any]) -> None:
    """Steps captured on a GPU read them there, whoever packs next."""
    drafter = tiny_drafter(tiny_target("llama"))
    first = drafter.pack()
    places = [packed.data_ptr() for packed in first]
    with torch.no_grad():
        drafter.midlayer.self_attn.q_proj.weight.add_(1)
    again = drafter.pack()
    assert [packed.data_ptr() for packed in again] == places
    assert torch.equal(
        again[0][: drafter.midlayer.self_attn.q_proj.out_features], drafter.midlayer.self_attn.q_proj.weight
    )
    assert drafter.double().pack()[1].dtype == torch.float64


def test_siblings_in_the_cache_do_not_see_each_other(case: Case) -> None:
    drafter = case.drafter
    cache = drafter.new_cache(B, 64)
    root = drafter.step(drafter.fuse(case.taps), case.embed(0), cache)[:, -1:]
    cache.keep(torch.tensor([T, T]), [T, T])
    embeds = torch.stack([case.target.embed(torch.tensor([5, 9])), case.target.embed(torch.tensor([7, 11]))], 1)
    own = torch.eye(2, dtype=torch.bool).expand(B, 2, 2)
    both = drafter.step(root.expand(B, 2, -1), embeds, cache, 0, own)
    for node in range(2):
        alone = drafter.step(root, embeds[:, node : node + 1], cache, 0, torch.ones(B, 1, 1, dtype=torch.bool))
        torch.testing.assert_close(both[:, node : node + 1], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma", "gemma3_text"])
def test_config_and_head_come_from_the_target(tiny_target: Callable[..., Any], family: str) -> None:
    target: Target = tiny_target(family)
    vocab = VocabMap.from_ids([3, 17, 42, 300], 320)
    config = Eagle3Config.from_target(target, vocab)
    drafter = Eagle3(config, vocab)
    drafter.init_from_target(target)
    head = target.model.get_output_embeddings().weight
    assert torch.equal(drafter.lm_head.weight, head[[3, 17, 42, 300]])
    gain = target.model.get_decoder().norm.weight
    assert torch.equal(drafter.norm.weight, gain + 1 if family.startswith("gemma") else gain)
    assert config.taps == target.taps and config.draft_vocab_size == 4 and config.vocab_size == 320
    assert config.max_position_embeddings == 512 and config.rope_parameters["rope_theta"] > 0
    # the tap nearest the output passes through fc, so that the first logits are not noise
    assert (drafter.fc.weight[:, -32:] - torch.eye(32)).abs().max() < 0.2


def test_the_state_dict_holds_no_embedding_and_no_rotary_table(case: Case) -> None:
    assert not [n for n in case.drafter.state_dict() if "embed" in n or "rot" in n or "inv_freq" in n]


def test_vocabulary_map() -> None:
    vocab = VocabMap.from_ids([9, 2, 5, 2], 12)
    assert vocab.kept_ids.tolist() == [2, 5, 9] and vocab.d2t.tolist() == [2, 4, 7]  # offsets, not ids
    assert vocab.t2d.nonzero().flatten().tolist() == [2, 5, 9] and vocab.size == 3 and not vocab.full
    assert vocab.to_target(torch.tensor([[0, 2]])).tolist() == [[2, 9]]
    assert vocab.to_draft(torch.tensor([2, 3, 9, 5, 0])).tolist() == [0, -1, 2, 1, -1]
    full = VocabMap.identity(12)
    assert full.full and not full.d2t.any() and full.hash() != vocab.hash()
    assert vocab.hash() == VocabMap.from_ids([2, 5, 9], 12).hash() != VocabMap.from_ids([2, 5, 9], 13).hash()
    for bad in ([], [-1, 2], [12]):
        with pytest.raises(ValueError, match="kept ids"):
            VocabMap.from_ids(bad, 12)
