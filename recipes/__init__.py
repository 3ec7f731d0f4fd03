"""Recipes, and how every entry point shows a mistake."""

import functools
import os
import sys
import traceback
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[1]


@functools.cache  # once: a hook that somebody sets later is theirs to keep
def tell_interrupted_start() -> None:
    """Ctrl-C while modules are still being imported, which takes seconds, ends a command of ours as it does later
    (recipes/cli.py): a line and 130. The rooms' `__init__` ask for it, before anything heavy is imported. Programs
    that only import us end as they would without."""
    before = sys.excepthook

    def told(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        modules = [frame.f_code for frame, _ in traceback.walk_tb(trace) if frame.f_code.co_name == "<module>"]
        # the command's own, and one that it imports
        if issubclass(kind, KeyboardInterrupt) and len(modules) > 1 and _ours(modules[0].co_filename):
            print("interrupted before it began: nothing was done", file=sys.stderr, flush=True)
            os._exit(130)
        before(kind, error, trace)

    sys.excepthook = told


def _ours(file: str) -> bool:
    """A command's, in a room of this repository (not in an environment that lies within it)."""
    return ROOT in Path(file).resolve().parents[1:2]
