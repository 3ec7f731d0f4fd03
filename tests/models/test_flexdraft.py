"""FlexDraft's masks: what they see, and that the target never notices them."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.attention import Documents
from models.flex_groups import Groups, attend_groups, attend_padded
from models.flexdraft import DraftAttention, FlexDraft, FlexDraftConfig
from models.packed import PackedForward
from models.target import Target, load_target
from recipes.schema import TargetConfig, UserError
from tests.tiny import tiny_model_folder

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text")
SIZE = 4


def make(folder: Path, family: str = "llama", layers: int = 3) -> tuple[Target, FlexDraft]:
    target = load_target(TargetConfig(path=str(tiny_model_folder(folder / family, family))))
    drafter = FlexDraft(FlexDraftConfig.from_target(target, layers, SIZE))
    drafter.init_from_target(target, [torch.arange(20)])
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return target, drafter


def dense(q: Tensor, own: tuple[Tensor, Tensor], prefix: tuple[Tensor, Tensor], groups: Groups, scale: float) -> Tensor:
    """One masked attention over all tokens and all masks."""
    N, R = q.shape[:2]
    T, times = prefix[0].shape[2], N // own[0].shape[0]
    k = torch.cat((prefix[0][0], own[0]), 1).repeat_interleave(times, 0)
    v = torch.cat((prefix[1][0], own[1]), 1).repeat_interleave(times, 0)
    mask = torch.zeros(R, T + R, dtype=torch.bool)
    row = 0
    for span, anchors in zip(groups.documents.spans, groups.anchors, strict=True):
        for anchor in anchors:
            mask[row : row + groups.size, span.start : span.start + anchor + 1] = True
            mask[row : row + groups.size, T + row : T + row + groups.size] = True
            row += groups.size
    scores = (q @ k.transpose(1, 2) * scale).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(3, 9), st.integers(0, 3)), min_size=1, max_size=3), st.integers(2, 5))
def test_groups_attend_as_one_dense_masked_attention(shape: list[tuple[int, int]], size: int) -> None:
    shape[0] = (shape[0][0], shape[0][1] or 1)
    draw = torch.Generator().manual_seed(0)
    documents = Documents([n for n, _ in shape], torch.device("cpu"))
    anchors = [sorted(torch.randperm(n - 1, generator=draw)[:count].tolist()) for n, count in shape]
    groups = Groups(documents, anchors, size)
    T, R = sum(documents.lengths), size * sum(map(len, anchors))
    q = torch.randn(4, R, 8, generator=draw, dtype=torch.float64, requires_grad=True)
    own = [torch.randn(2, R, 8, generator=draw, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    prefix = [torch.randn(1, 2, T, 8, generator=draw, dtype=torch.float64) for _ in range(2)]
    wanted = dense(q, (own[0], own[1]), (prefix[0], prefix[1]), groups, 0.3)
    weight = torch.randn(wanted.shape, generator=draw, dtype=torch.float64)
    slopes = torch.autograd.grad((wanted * weight).sum(), [q, *own])
    for way in (attend_groups, attend_padded):
        found = way(q, (own[0], own[1]), (prefix[0], prefix[1]), groups, 0.3)
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)
        got = torch.autograd.grad((found * weight).sum(), [q, *own])
        for one, other in zip(got, slopes, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    for softcap, window in ((None, 3), (5.0, None), (5.0, 4)):
        parts = (q, (own[0], own[1]), (prefix[0], prefix[1]), groups, 0.3, softcap, window)
        torch.testing.assert_close(attend_padded(*parts), attend_groups(*parts), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_clean_rows_are_the_targets_own_and_training_says_what_decoding_says(tmp_path: Path, family: str) -> None:
    target, drafter = make(tmp_path, family)
    ids = torch.randint(2, 300, (31,), generator=torch.Generator().manual_seed(1))
    documents = Documents([19, 12], torch.device("cpu"))
    states, keys = PackedForward(target, drafter.config.split_layer).read(ids, documents)
    assert torch.equal(states.final_BTH, target.packed_features(ids, documents).final_BTH)  # to the bit
    groups = Groups(documents, [[4, 11, 17], [10]], SIZE)
    with torch.no_grad():
        said = drafter.groups(target, keys, groups).view(4, SIZE, -1)
    for number, (span, anchor) in enumerate([(0, 4), (0, 11), (0, 17), (1, 10)]):
        cache = target.new_cache(1, 64)
        prefix = ids[documents.spans[span]][: anchor + 1].unsqueeze(0)
        target.prefill(prefix, [anchor + 1], cache)
        torch.testing.assert_close(drafter.block(target, cache)[0], said[number], atol=2e-5, rtol=1e-4)


def test_a_group_does_not_see_past_its_anchor_nor_other_groups(tmp_path: Path) -> None:
    target, drafter = make(tmp_path)
    ids = torch.arange(2, 26)
    documents = Documents([24], torch.device("cpu"))

    def states(tokens: Tensor, anchors: list[int]) -> Tensor:
        _, keys = PackedForward(target, drafter.config.split_layer).read(tokens, documents)
        with torch.no_grad():
            return drafter.groups(target, keys, Groups(documents, [anchors], SIZE)).view(len(anchors), SIZE, -1)

    before = states(ids, [5, 9, 14])
    changed = ids.clone()
    changed[10:] = 7
    after = states(changed, [5, 9, 14])
    torch.testing.assert_close(after[:2], before[:2], atol=1e-6, rtol=1e-6)
    assert not torch.allclose(after[2], before[2], atol=1e-3)
    torch.testing.assert_close(states(ids, [9])[0], before[1], atol=1e-5, rtol=1e-5)


def test_ragged_rows_draft_as_each_would_alone(tmp_path: Path) -> None:
    target, drafter = make(tmp_path, "qwen3")
    ids = torch.randint(2, 300, (2, 17), generator=torch.Generator().manual_seed(1))
    cache = target.new_cache(2, 64)
    target.prefill(ids, [17, 6], cache)
    together = drafter.block(target, cache)
    for row, length in enumerate([17, 6]):
        alone = target.new_cache(1, 64)
        target.prefill(ids[row : row + 1, :length], [length], alone)
        torch.testing.assert_close(drafter.block(target, alone)[0], together[row], atol=1e-5, rtol=1e-4)


def test_too_many_layers_are_refused_by_name(tmp_path: Path) -> None:
    target = load_target(TargetConfig(path=str(tiny_model_folder(tmp_path))))
    with pytest.raises(UserError, match=r"flex\.layers=9 is out of range: this target has 8 layers"):
        FlexDraftConfig.from_target(target, 9, SIZE)


def test_packed_weights_of_masks_keep_their_place_and_follow_the_drafters(tmp_path: Path) -> None:
    """Steps recorded on a GPU read them there, whichever engine packs next."""
    target = load_target(TargetConfig(path=str(tiny_model_folder(tmp_path, "qwen2"))))  # projections with biases
    own = FlexDraft(FlexDraftConfig.from_target(target, 2, 4)).layers[0]
    assert isinstance(own, DraftAttention)
    own.pack()
    assert own.packed is not None and own.packed[1] is not None
    places = [part.data_ptr() for part in own.packed if part is not None]
    with torch.no_grad():
        own.q_proj.weight.add_(1)
        own.v_proj.bias.add_(1)
    own.pack()
    assert [part.data_ptr() for part in own.packed if part is not None] == places
    assert torch.equal(own.packed[0][: own.q_proj.out_features], own.q_proj.weight)
    assert torch.equal(own.packed[1][-own.v_proj.out_features :], own.v_proj.bias)
