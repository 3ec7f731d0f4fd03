"""What happens when memory runs out: what was tried is dropped, and fewer rows are tried at once. And when Python looks
for what it can drop."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch

from recipes.schema import UserError

T = TypeVar("T")
WORDS = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
SMALLER = "Lower eval.max_prompt, eval.max_new_tokens or eval.nodes, or give a smaller target or dtype"


class NoRoom(UserError):
    """Memory does not hold what was asked for."""


def too_many(rows: int) -> NoRoom:
    return NoRoom(f"out of memory at batch {rows}. {f'Try {rows // 2}' if rows > 1 else SMALLER}")


def ran_out(error: BaseException) -> bool:
    """Whether an allocation failed, or one did before what this error is about: recording a step ends in another error
    then. torch has a class for what its allocator asks a GPU for, and only words for all else."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, RuntimeError) and any(words in str(error) for words in WORDS):
        return True
    return error.__context__ is not None and ran_out(error.__context__)


def attempt(run: Callable[[], T]) -> T | None:
    """What `run` returns; None where memory ran out, and then what it had allocated is free again."""
    try:
        return run()
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
    frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()  # only now: the error held the frames, and they the tensors
    if frozen:
        gc.freeze()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


def by_halving(slots: int, run: Callable[[int], T]) -> T:
    """`run(slots)`, with half as many each time memory runs out; it must leave nothing behind where it fails. Raises
    UserError where not even one fits."""
    while (found := attempt(partial(run, slots))) is None:
        if slots == 1:
            raise NoRoom(f"out of memory at a single row. {SMALLER}")
        slots = (slots + 1) // 2
    return found


@contextmanager
def unpaused() -> Iterator[None]:
    """Python's collector leaves alone what is there already: to go through all of torch's and transformers' objects
    takes it 0.2 s, which is some prompts' time on a GPU and would be charged to whichever decoder runs just then."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
