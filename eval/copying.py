"""Drafts copied from a row's own prompt and output: where its last tokens stood before, what followed them there.

Both searches run on the host and take each token once. Of several earlier places the first counts: most follows it.
"""

from collections.abc import Iterable

LONGEST = 3  # n-gram that `lookup` looks for (prompt lookup decoding)
DRAFTS_A_MATCH = 4  # drafts of `suffix` a matched token (SAM-Decoding, arXiv 2411.10666)


class Lookup:
    """Prompt lookup: the longest n-gram up to three tokens that ends the text and stood in it before."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> where its first occurrence ends
        self._start: int | None = None  # of what followed the match

    def add(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.text.append(token)
            end, self._start = len(self.text), None
            for n in range(min(LONGEST, end), 0, -1):
                before = self._after.setdefault(tuple(self.text[end - n :]), end)
                if before < end and self._start is None:
                    self._start = before

    def draft(self, most: int) -> list[int]:
        return [] if self._start is None else self.text[self._start : self._start + most]


class Suffix:
    """A suffix automaton: the longest suffix of the text, of any length, that stood in it before.

    States are sets of substrings with the same ends; `next` by token, `link` to the state of the longest suffix with
    more ends, `length` of the longest substring, `end` of its first occurrence.
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length, self._end = [-1], [0], [0]
        self._last = 0  # state of the whole text

    def add(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._grow(token)

    def _state(self, next_: dict[int, int], link: int, length: int, end: int) -> int:
        self._next.append(next_)
        self._link.append(link)
        self._length.append(length)
        self._end.append(end)
        return len(self._next) - 1

    def _grow(self, token: int) -> None:
        """Blumer et al. (1985): append a token in amortised constant time."""
        self.text.append(token)
        end = len(self.text)
        new, state = self._state({}, 0, end, end), self._last
        self._last = new
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state < 0:
            return
        other = self._next[state][token]
        if self._length[other] == self._length[state] + 1:
            self._link[new] = other
            return
        clone = self._state(dict(self._next[other]), self._link[other], self._length[state] + 1, self._end[other])
        self._link[other] = self._link[new] = clone
        while state >= 0 and self._next[state].get(token) == other:
            self._next[state][token] = clone
            state = self._link[state]

    def draft(self, most: int) -> list[int]:
        """Four tokens a matched one, up to `most`: the whole text's link is its longest suffix that ended earlier."""
        match = max(0, self._link[self._last])
        start = self._end[match]
        return self.text[start : start + min(most, DRAFTS_A_MATCH * self._length[match])]
