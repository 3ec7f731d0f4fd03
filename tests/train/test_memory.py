"""What a training step holds, read off the allocator: as much as a dry run says, and linear in the tokens."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from data_prep import teacher
from recipes.schema import EagleConfig, Recipe, TrainConfig
from scripts import bench_train
from train import cost, fused_loss

CPU = torch.device("cpu")
SHAPE = bench_train.SHAPES["tiny"]
CONFIG = {
    "hidden_size": SHAPE.hidden,
    "intermediate_size": SHAPE.mlp,
    "num_attention_heads": SHAPE.heads,
    "num_key_value_heads": SHAPE.kv_heads,
    "head_dim": SHAPE.head,
}


def held_and_peak(tokens: int, dtype: torch.dtype, recompute: bool) -> tuple[int, int]:
    """Bytes beyond what was there before: after the forward, and at most in the whole step."""
    target = bench_train.Frozen(SHAPE, CPU, dtype)
    world = bench_train.World.make(SHAPE, bench_train.Case(1, tokens), target)
    step, _ = bench_train.ours(world, "soft_ce", recompute)
    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [(e.name(), e.start_ns(), e.nbytes()) for e in profiler.profiler.kineto_results.events()]
    backward = min(at for name, at, _ in events if name.startswith("autograd::engine"))
    now = held = peak = 0
    for at, size in sorted((at, size) for name, at, size in events if name == "[memory]"):
        now += size
        peak = max(peak, now)
        held = now if at < backward else held
    return held, peak


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "recompute"), [(torch.bfloat16, False), (torch.float32, True)])
def test_a_step_holds_what_is_said_of_it_and_its_peak_is_linear_in_its_tokens(
    dtype: torch.dtype, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_loss, "CHUNK_CPU", 2**12)
    monkeypatch.setattr(teacher, "CHUNK", 2**13)
    sizes = (64, 128, 256)
    (one, low), (two, middle), (_, high) = (held_and_peak(n, dtype, recompute) for n in sizes)
    train = TrainConfig(micro_batch_tokens=64, recompute=recompute)
    said = cost.activations(CONFIG, Recipe(train=train, eagle=EagleConfig()), dtype.itemsize)
    if recompute:  # the step that the backward runs again is not there yet
        said -= cost.activations(CONFIG, Recipe(train=train, eagle=EagleConfig(unroll_steps=0)), dtype.itemsize)
    assert 0.85 * (two - one) < said < 1.15 * (two - one)
    assert (high - middle) / 128 == pytest.approx((middle - low) / 64, rel=0.1)
