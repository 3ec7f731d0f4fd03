"""The one rule that says an output repeats itself (data preparation drops such answers, evaluation flags them)."""

from collections.abc import Sequence

import numpy as np

LONGEST = 32  # tokens of the repeated n-gram
TIMES = 4  # in a row, at least
SPAN = 24  # tokens that the repeats cover together, at least


def is_loop(tokens: Sequence[int] | np.ndarray) -> bool:
    """True iff some n-gram of up to 32 tokens stands at least four times in a row, over at least 24 tokens.

    A stretch of period n that is m tokens long is a run of m - n positions j with tokens[j] == tokens[j + n].
    """
    row = np.asarray(tokens, dtype=np.int64)
    for n in range(1, LONGEST + 1):
        needed = n * (max(TIMES, -(-SPAN // n)) - 1)  # whole repeats only
        if len(row) - n < needed:
            continue
        differs = np.flatnonzero(row[n:] != row[:-n])
        edges = np.concatenate(([-1], differs, [len(row) - n]))
        if int(np.diff(edges).max()) - 1 >= needed:
            return True
    return False
