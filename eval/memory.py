"""What happens when memory runs out: what was tried is dropped, and fewer rows are tried at once."""

import gc
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch

from recipes.schema import UserError

T = TypeVar("T")
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


def by_halving(slots: int, run: Callable[[int], T]) -> T:
    """`run(slots)`, with half as many each time memory runs out; it must leave nothing behind where it fails. Raises
    UserError where not even one fits."""
    while (found := attempt(partial(run, slots))) is None:
        if slots == 1:
            raise UserError(f"out of memory at a single row. {SMALLER}")
        slots = (slots + 1) // 2
    return found
