"""Intervals for ratios of sums, by a paired bootstrap over prompts: prompts are the unit that varies.

A resample draws whole prompts, so a prompt's numerator, denominator and its baseline run move together. Every figure is
a ratio of sums, never a mean of per-prompt ratios: long answers count for what they cost.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Interval = tuple[float, float]
Column = Sequence[float] | NDArray[np.float64]


def ratio(numerator: Column, denominator: Column) -> float:
    """sum(numerator) / sum(denominator); 0 when there is nothing to divide by."""
    below = float(np.sum(denominator))
    return float(np.sum(numerator)) / below if below else 0.0


def ratio_interval(
    numerator: Column, denominator: Column, seed: int = 0, resamples: int = 4000, level: float = 0.95
) -> Interval | None:
    """Percentile interval of `ratio` over resampled prompts [n]; None for fewer than two prompts."""
    weights = _weights(len(numerator), seed, resamples)
    return None if weights is None else _percentiles(_ratios(weights, numerator, denominator), level)


def speedup_interval(
    tokens: Column,
    seconds: Column,
    base_tokens: Column,
    base_seconds: Column,
    seed: int = 0,
    resamples: int = 4000,
) -> Interval | None:
    """95 % interval of (tokens / seconds) / (base_tokens / base_seconds), the four columns [n] resampled together."""
    weights = _weights(len(tokens), seed, resamples)
    if weights is None:
        return None
    return _percentiles(_ratios(weights, tokens, seconds) / _ratios(weights, base_tokens, base_seconds))


def difference_interval(
    above: Column, below: Column, other_above: Column, other_below: Column, seed: int = 0, resamples: int = 4000
) -> Interval | None:
    """95 % interval of other_above / other_below - above / below, the four columns [n] resampled together."""
    weights = _weights(len(above), seed, resamples)
    if weights is None:
        return None
    return _percentiles(_ratios(weights, other_above, other_below) - _ratios(weights, above, below))


def grouped(values: Column, groups: Sequence[int]) -> NDArray[np.float64]:
    """Sums of values [n] by group, in order of first appearance: a batch shares one clock, so it is one unit."""
    order = {group: place for place, group in enumerate(dict.fromkeys(groups))}
    sums = np.zeros(len(order))
    np.add.at(sums, [order[group] for group in groups], np.asarray(values, dtype=np.float64))
    return sums


def _weights(n: int, seed: int, resamples: int) -> NDArray[np.float64] | None:
    """How often each of n units is drawn in each resample [resamples, n]."""
    if n < 2:
        return None
    seed &= 2**64 - 1  # a negative seed is one too
    drawn = np.random.default_rng(seed).multinomial(n, np.full(n, 1.0 / n), size=resamples)
    return drawn.astype(np.float64)


def _ratios(weights: NDArray[np.float64], above: Column, below: Column) -> NDArray[np.float64]:
    bottom = weights @ np.asarray(below, dtype=np.float64)
    top = weights @ np.asarray(above, dtype=np.float64)
    return np.divide(top, bottom, out=np.full_like(top, np.nan), where=bottom > 0)


def _percentiles(ratios: NDArray[np.float64], level: float = 0.95) -> Interval | None:
    finite = ratios[np.isfinite(ratios)]
    if not len(finite):
        return None
    low, high = np.percentile(finite, [50 - 50 * level, 50 + 50 * level])
    return float(low), float(high)
