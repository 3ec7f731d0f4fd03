"""Recipes, and how every entry point shows a mistake."""

import os
import sys
import traceback
from types import TracebackType

before = sys.excepthook


def tell_interrupted_start() -> None:
    """Ctrl-C while modules are still being imported, which takes seconds, ends a command as it does later
    (recipes/cli.py): a line and 130. The rooms' `__init__` ask for it, before anything heavy is imported."""
    sys.excepthook = _told


def _told(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    modules = [frame for frame, _ in traceback.walk_tb(trace) if frame.f_code.co_name == "<module>"]
    if issubclass(kind, KeyboardInterrupt) and len(modules) > 1:  # the command's own, and one that it imports
        print("interrupted before it began: nothing was done", file=sys.stderr, flush=True)
        os._exit(130)
    before(kind, error, trace)
