"""The kernels of a GPU against the plain layers: whole decoding steps, in fp32. They need a GPU and say so."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from eval.decode import decode
from eval.engine import Engines, Settings
from models.target import Target, load_target
from recipes.schema import TargetConfig
from tests.tiny import tiny_drafter

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels run on a GPU alone")


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def target(request: pytest.FixtureRequest, tiny_target: Callable[..., Any]) -> Target:
    folder = tiny_target(request.param, head_dim=16).folder
    return load_target(TargetConfig(path=str(folder)), "cuda", torch.float32)


@pytest.mark.parametrize("lengths", [(5, 70, 3), (300,)])
def test_a_tree_is_verified_as_by_the_plain_layers(target: Target, lengths: tuple[int, ...]) -> None:
    source = torch.Generator().manual_seed(0)
    prompts = torch.randint(2, 320, (len(lengths), max(lengths)), generator=source).cuda()
    tree = torch.randint(2, 320, (len(lengths), 9), generator=source).cuda()
    seen = torch.rand(len(lengths), 9, 9, generator=source).cuda() < 0.5
    seen |= torch.eye(9, dtype=torch.bool, device="cuda")
    depths = seen.sum(2) - 1
    found = []
    for bucket in (0, 512):  # the plain way, and the kernels
        cache = target.new_cache(len(lengths), 512)
        target.prefill(prompts, list(lengths), cache)
        cache.bucket = bucket
        found.append(target.forward(tree, cache, depths, seen))
    torch.testing.assert_close(found[0].taps_BTC, found[1].taps_BTC, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(found[0].final_BTH, found[1].final_BTH, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("decoder", ["ar", "chain", "eagle", "graft"])
def test_captured_decoding_says_the_same(target: Target, decoder: str) -> None:
    drafter = tiny_drafter(target, noise=0.0).cuda()
    prompts = [[5, 9, 3], [7] * 40, [11, 12]]
    settings = Settings(decoder, 40, depth=4, branch=4, nodes=20, gates=(0.3, 0.1, 0.5))
    plain = decode(target, drafter, prompts, settings, engines=Engines(fixed=False))
    engines = Engines()
    for _ in range(3):  # as it stands, recorded, replayed
        assert decode(target, drafter, prompts, settings, engines=engines).rows == plain.rows
