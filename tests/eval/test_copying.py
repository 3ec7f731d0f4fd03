"""The two searches of a row's own text, against plain loops over all places and lengths."""

from hypothesis import given, settings
from hypothesis import strategies as st

from eval.copying import DRAFTS_A_MATCH, LONGEST, Lookup, Suffix


def slow(text: list[int], longest: int) -> tuple[int, int]:
    """(length, place behind its first occurrence) of the longest suffix, up to `longest`, that ended earlier too."""
    for length in range(min(longest, len(text) - 1), 0, -1):
        for end in range(length, len(text)):
            if text[end - length : end] == text[-length:]:
                return length, end
    return 0, 0


@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(0, 2), max_size=60), st.integers(1, 12), st.data())
def test_both_find_what_a_plain_search_finds(text: list[int], most: int, data: st.DataObject) -> None:
    """After every token, however the tokens come in parts."""
    lookup, suffix = Lookup(), Suffix()
    done = 0
    while done < len(text):
        part = data.draw(st.integers(1, len(text) - done))
        lookup.add(text[done : done + part])
        suffix.add(text[done : done + part])
        done += part
        length, end = slow(text[:done], LONGEST)
        assert lookup.draft(most) == (text[end:done][:most] if length else [])
        length, end = slow(text[:done], done)
        assert suffix.draft(most) == text[end:done][: min(most, DRAFTS_A_MATCH * length)]


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 4), st.integers(2, 30))
def test_long_repeats(tail: list[int], period: int, times: int) -> None:
    text = [*range(period)] * times + tail
    suffix = Suffix()
    suffix.add(text)
    length, end = slow(text, len(text))
    assert suffix.draft(1000) == text[end:][: DRAFTS_A_MATCH * length]


def test_a_text_without_a_repeat_is_not_copied() -> None:
    for text in (Lookup(), Suffix()):
        assert text.draft(10) == []
        text.add([5, 3, 9])
        assert text.draft(10) == []


def test_the_automaton_stays_linear_in_the_text() -> None:
    suffix = Suffix()
    suffix.add([(i * i) % 7 for i in range(3000)])
    assert len(suffix._link) <= 2 * 3000
