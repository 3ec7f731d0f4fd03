"""Intervals against closed forms, and their coverage on data whose truth is known."""

import numpy as np
import pytest

from eval import stats


def test_a_ratio_is_of_sums_and_not_a_mean_of_ratios() -> None:
    assert stats.ratio([10, 1], [10, 4]) == pytest.approx(11 / 14)
    assert stats.ratio([], []) == 0.0


def test_the_interval_is_a_point_where_every_prompt_agrees() -> None:
    assert stats.ratio_interval([3, 6, 9], [1, 2, 3]) == pytest.approx((3.0, 3.0))


def test_one_prompt_gives_no_interval() -> None:
    assert stats.ratio_interval([3], [1]) is None
    assert stats.speedup_interval([3], [1], [3], [1]) is None


def test_the_interval_matches_the_normal_one_of_a_mean() -> None:
    values = np.random.default_rng(1).normal(2.0, 0.5, 400)
    interval = stats.ratio_interval(values, np.ones(400))
    assert interval is not None
    half = 1.96 * values.std() / 20
    assert interval == pytest.approx((values.mean() - half, values.mean() + half), abs=0.01)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng, hits = np.random.default_rng(2), 0
    for trial in range(200):
        drawn = rng.integers(20, 120, 40)
        rounds = drawn.astype(np.float64)
        emitted = rng.binomial(drawn, 0.4).astype(np.float64) + rounds  # truth: 1.4
        interval = stats.ratio_interval(emitted, rounds, seed=trial, resamples=600)
        assert interval is not None
        hits += interval[0] <= 1.4 <= interval[1]
    assert 0.89 <= hits / 200 <= 0.99


def test_pairing_takes_out_what_both_runs_share() -> None:
    """Prompts differ in speed by a lot, the two decoders by exactly 1.5: the paired interval is a point."""
    rng = np.random.default_rng(3)
    tokens, seconds = rng.uniform(50, 200, 20), rng.uniform(1, 30, 20)
    assert stats.speedup_interval(tokens, seconds, tokens, 1.5 * seconds) == pytest.approx((1.5, 1.5))


def test_the_seed_decides() -> None:
    values, ones = np.random.default_rng(4).normal(size=30), np.ones(30)
    assert stats.ratio_interval(values, ones, seed=1) == stats.ratio_interval(values, ones, seed=1)
    assert stats.ratio_interval(values, ones, seed=1) != stats.ratio_interval(values, ones, seed=2)


def test_prompts_of_one_batch_are_one_unit() -> None:
    assert stats.grouped([1, 2, 4, 8], [7, 7, 3, 7]).tolist() == [11, 4]


def test_any_whole_number_is_a_seed() -> None:
    ones = [1.0, 2.0, 3.0]
    assert all(stats.ratio_interval(ones, [1.0] * 3, seed, 50) for seed in (-1, 0, 2**70))
