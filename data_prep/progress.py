"""A progress bar with tokens/s and time left; plain lines now and then where there is no terminal."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

HEARTBEAT = 30.0  # seconds between lines in a log


@contextmanager
def meter(label: str, total: int) -> Iterator[Callable[[int, int], None]]:
    """Yield report(prompts done so far, tokens so far)."""
    console = Console(stderr=True)
    began = heard = time.monotonic()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]:,.0f} tokens/s"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task(label, total=total, speed=0.0)

        def report(done: int, tokens: int) -> None:
            nonlocal heard
            now = time.monotonic()
            speed = tokens / max(now - began, 1e-9)
            progress.update(task, completed=done, speed=speed)
            if not console.is_terminal and now - heard >= HEARTBEAT:
                heard = now
                left = f", {(now - began) / done * (total - done):.0f} s left" if done else ""
                print(f"{label}: {done} of {total}, {speed:,.0f} tokens/s{left}", flush=True)

        yield report
