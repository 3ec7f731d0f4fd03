"""Copies of whole layers: masks run through feed-forward blocks and norms of their own, tokens through the target's."""

from pathlib import Path

import pytest
import torch

from models.attention import Documents
from models.flex_groups import Groups
from models.flex_layout import load_flexdraft, save_flexdraft
from models.flexdraft import FlexDraft, FlexDraftConfig
from models.packed import PackedForward
from models.target import Target, load_target
from recipes.schema import TargetConfig
from tests.tiny import tiny_model_folder

SIZE = 4
Pair = tuple[Target, FlexDraft]


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Layers with two norms, and with four."""
    target = load_target(
        TargetConfig(path=str(tiny_model_folder(tmp_path_factory.mktemp(request.param), request.param)))
    )
    drafter = FlexDraft(FlexDraftConfig.from_target(target, 3, SIZE, whole=True))
    drafter.init_from_target(target, [torch.arange(20)])
    return target, drafter


def moved(pair: Pair) -> FlexDraft:
    """With other blocks and norms than the target's."""
    torch.manual_seed(0)
    drafter = FlexDraft(pair[1].config)
    drafter.load_state_dict({n: t + 0.1 * torch.randn_like(t) for n, t in pair[1].state_dict().items()})
    return drafter.eval()


def test_it_starts_as_copies_of_attention_alone_do(pair: Pair) -> None:
    target, drafter = pair
    narrow = FlexDraft(FlexDraftConfig.from_target(target, 3, SIZE))
    narrow.init_from_target(target, [torch.arange(20)])
    cache = target.new_cache(1, 64)
    target.prefill(torch.arange(3, 12).unsqueeze(0), [9], cache)
    torch.testing.assert_close(drafter.block(target, cache), narrow.block(target, cache))
    assert not torch.allclose(moved(pair).block(target, cache), narrow.block(target, cache), atol=1e-2)


def test_training_parallel_and_sequential_decoding_say_the_same(pair: Pair) -> None:
    target, drafter = pair[0], moved(pair)
    ids = torch.randint(2, 300, (19,), generator=torch.Generator().manual_seed(1))
    documents = Documents([19], torch.device("cpu"))
    _, keys = PackedForward(target, drafter.config.split_layer).read(ids, documents)
    anchors = [12, 13, 14]
    with torch.no_grad():
        trained = drafter.groups(target, keys, Groups(documents, [anchors], SIZE)).view(3, SIZE, -1)
    cache = target.new_cache(1, 64)
    target.prefill(ids[None, :12], [12], cache)
    final, groups = drafter.verify(target, ids[None, 12:15], cache)
    torch.testing.assert_close(groups[0], trained, atol=2e-5, rtol=1e-4)
    plain = target.new_cache(1, 64)
    target.prefill(ids[None, :12], [12], plain)
    torch.testing.assert_close(final, target.forward(ids[None, 12:15], plain).final_BTH, atol=1e-5, rtol=1e-5)
    alone = target.new_cache(1, 64)
    target.prefill(ids[None, :15], [15], alone)
    torch.testing.assert_close(drafter.block(target, alone)[0], trained[2], atol=2e-5, rtol=1e-4)


def test_all_of_it_learns_and_comes_back_from_disk(pair: Pair, tmp_path: Path) -> None:
    target, drafter = pair[0], moved(pair)
    documents = Documents([12], torch.device("cpu"))
    _, keys = PackedForward(target, drafter.config.split_layer).read(torch.arange(2, 14), documents)
    drafter.groups(target, keys, Groups(documents, [[5]], SIZE)).square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.abs().max() > 0) for p in drafter.parameters())
    save_flexdraft(drafter, tmp_path / "out", {"fingerprint": target.fingerprint})
    again = load_flexdraft(tmp_path / "out", target)
    assert all(torch.equal(again.state_dict()[name], t) for name, t in drafter.state_dict().items())
