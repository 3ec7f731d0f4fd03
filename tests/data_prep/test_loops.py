"""The loop rule, against its wording."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from data_prep.loops import is_loop


def slow_is_loop(tokens: list[int]) -> bool:
    for n in range(1, 33):
        for start in range(len(tokens)):
            gram = tokens[start : start + n]
            times = 0
            while tokens[start + times * n : start + (times + 1) * n] == gram and len(gram) == n:
                times += 1
            if times >= 4 and times * n >= 24:
                return True
    return False


piece = st.lists(st.integers(0, 2), min_size=1, max_size=33)


@given(piece, piece, st.integers(1, 26), piece)
@example([1], [7], 23, [2])
@example([1], [7], 24, [2])
@example([], [1, 2, 3, 4, 5, 6], 4, [])
@example([], [1, 2, 3, 4, 5], 4, [])
@example([], list(range(32)), 4, [])
@example([], list(range(33)), 4, [])
def test_is_loop_is_its_wording(before: list[int], repeated: list[int], times: int, after: list[int]) -> None:
    tokens = before + repeated * times + after
    assert is_loop(tokens) == slow_is_loop(tokens)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [([], False), ([4] * 23, False), ([4] * 24, True), (list(range(8)) * 3, False), (list(range(8)) * 4, True)],
)
def test_is_loop_at_its_limits(tokens: list[int], expected: bool) -> None:
    assert is_loop(tokens) == expected
