"""Near-duplicate texts: Jaccard similarity of word 5-grams, exact, and linear where texts are mostly different."""

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from math import ceil

# one word = a run of letters and digits, or a single character of a script that is written without spaces
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")
NGRAM = 5
THRESHOLD = 0.5


def words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def normalised(text: str) -> str:
    """Equal for texts that differ only in case, punctuation and spacing (texts without a word are kept as they are)."""
    return " ".join(words(text)) or text.strip()


def shingles(text: str) -> frozenset[int]:
    """Hashes of the word 5-grams; a shorter text is one shingle."""
    parts = words(text)
    grams = [" ".join(parts[i : i + NGRAM]) for i in range(max(1, len(parts) - NGRAM + 1))]
    return frozenset(int.from_bytes(hashlib.blake2b(g.encode(), digest_size=8).digest(), "big") for g in grams)


def near_duplicates(texts: Sequence[str], against: Sequence[str] = (), among: bool = True) -> list[bool]:
    """For each text: is it at least half the same as one of `against`, or (`among`) as an earlier text that is kept?

    Prefix filter (Chaudhuri et al. 2006; Bayardo et al. 2007): with shingles in one global order, two sets of Jaccard
    similarity t or more share one of the first |x| - ceil(t |x|) + 1 of each. Rarest first keeps the lists short.
    """
    sets = [shingles(t) for t in (*against, *texts)]
    frequency = Counter(s for shingle_set in sets for s in shingle_set)
    index: dict[int, list[int]] = defaultdict(list)
    verdicts = []
    for i, mine in enumerate(sets):
        ordered = sorted(mine, key=lambda s: (frequency[s], s))
        prefix = ordered[: len(ordered) - ceil(THRESHOLD * len(ordered)) + 1]
        candidates = {j for s in prefix for j in index[s]}
        found = i >= len(against) and any(_jaccard(mine, sets[j]) >= THRESHOLD for j in candidates)
        verdicts.append(found)
        if i < len(against) or (among and not found):
            for s in prefix:
                index[s].append(i)
    return verdicts[len(against) :]


def _jaccard(a: frozenset[int], b: frozenset[int]) -> float:
    shared = len(a & b)
    return shared / (len(a) + len(b) - shared)
