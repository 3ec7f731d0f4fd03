"""When a run is stopped, and when not."""

import math
import random

import pytest

from train.guard import MEMORY, Guard


def test_a_learning_curve_with_noise_raises_no_alarm() -> None:
    """From 11 down to 2 with a tenth of noise: steeper than any run of ours."""
    draw, guard = random.Random(0), Guard(3.0, warmup=5)
    for step in range(1, 2001):
        loss = (2 + 9 * math.exp(-step / 40)) * draw.uniform(0.9, 1.1)
        assert guard.fault(step, loss, draw.uniform(0.1, 20)) is None


def test_a_spike_is_above_three_times_the_median_of_the_last_fifty() -> None:
    guard = Guard(3.0, warmup=0)
    assert [guard.fault(step, 2.0, 1.0) for step in range(1, MEMORY + 1)] == [None] * MEMORY
    assert guard.fault(51, 5.9, 1.0) is None
    assert "step 52 is 6.1, 3.0 times" in (guard.fault(52, 6.1, 1.0) or "")


@pytest.mark.parametrize("guard", [Guard(0.0, 0), Guard(3.0, 1000)], ids=["switched off", "warming up"])
def test_no_spike_is_seen(guard: Guard) -> None:
    assert all(guard.fault(step, 1.0 if step < 100 else 50.0, 1.0) is None for step in range(1, 200))


def test_nothing_is_a_spike_before_fifty_steps_were_seen() -> None:
    guard = Guard(3.0, warmup=0)
    assert all(guard.fault(step, 1.0 if step < MEMORY else 99.0, 1.0) is None for step in range(1, MEMORY + 1))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_stops_at_once(bad: float) -> None:
    assert Guard(0.0, 0).fault(1, bad, 1.0) == "the loss of step 1 is not a number"
    assert Guard(0.0, 0).fault(1, 1.0, bad) == "the gradient of step 1 is not a number"
