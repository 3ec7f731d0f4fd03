"""What happens when memory runs out: what was tried is dropped, and fewer rows are tried at once."""

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch

from recipes.schema import UserError

T = TypeVar("T")
Item = TypeVar("Item")
SMALLER = "Lower eval.max_prompt, eval.max_new_tokens or eval.nodes, or give a smaller target or dtype"


def ran_out(error: BaseException) -> bool:
    """Whether an allocation failed. torch has a class for a GPU's memory, and only words for the host's."""
    words = "can't allocate memory"
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and words in str(error)
    )


def attempt(run: Callable[[], T]) -> T | None:
    """What `run` returns; None where memory ran out, and then what it had allocated is free again."""
    try:
        return run()
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
    gc.collect()  # only now: the error held the frames, and they the tensors
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


def by_halving(items: Sequence[Item], size: int, run: Callable[[Sequence[Item]], object]) -> int:
    """`run` on parts of at most `size` items; the size is halved each time memory runs out. Returns the last size.

    `run` must leave nothing behind where it fails. Raises UserError where not even one item fits.
    """

    def finished(part: Sequence[Item]) -> bool:
        run(part)
        return True

    start = 0
    while start < len(items):
        part = items[start : start + size]
        if attempt(partial(finished, part)):
            start += len(part)
        elif len(part) == 1:
            raise UserError(f"out of memory at a single row. {SMALLER}")
        else:
            size = (len(part) + 1) // 2
    return size
