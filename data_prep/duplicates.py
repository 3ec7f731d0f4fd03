"""Near-duplicate texts: Jaccard similarity of word 5-grams, candidates found by MinHash and verified exactly."""

import re
from collections.abc import Sequence

# one word = a run of letters and digits, or a single character of a script that is written without spaces
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")
NGRAM = 5
THRESHOLD = 0.5
# 42 bands of 3: a pair of similarity s is looked at with probability 1 - (1 - s^3)^42, at the threshold 99.6 %
BANDS, BAND = 42, 3


def words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def normalised(text: str) -> str:
    """Equal for texts that differ only in case, punctuation and spacing (texts without a word are kept as they are)."""
    return " ".join(words(text)) or text.strip()


def shingles(text: str) -> frozenset[str]:
    """The word 5-grams; a shorter text is one shingle."""
    parts = words(text)
    return frozenset(" ".join(parts[i : i + NGRAM]) for i in range(max(1, len(parts) - NGRAM + 1)))


def near_duplicates(texts: Sequence[str], against: Sequence[str] = (), among: bool = True) -> list[bool]:
    """For each text: is it at least half the same as one of `against`, or (`among`) as an earlier text that is kept?

    Nothing less alike is ever named; of the pairs just at the threshold, MinHash overlooks one in 250.
    """
    from datasketch import MinHash, MinHashLSH

    sets = [shingles(t) for t in (*against, *texts)]
    sketches = MinHash.bulk([[s.encode() for s in shingle_set] for shingle_set in sets], num_perm=BANDS * BAND)
    index = MinHashLSH(num_perm=BANDS * BAND, params=(BANDS, BAND))
    verdicts = []
    for i, (mine, sketch) in enumerate(zip(sets, sketches, strict=True)):
        found = i >= len(against) and any(_jaccard(mine, sets[j]) >= THRESHOLD for j in index.query(sketch))
        verdicts.append(found)
        if i < len(against) or (among and not found):
            index.insert(i, sketch)
    return verdicts[len(against) :]


def _jaccard(a: frozenset[str], b: frozenset[str]) -> float:
    shared = len(a & b)
    return shared / (len(a) + len(b) - shared)
