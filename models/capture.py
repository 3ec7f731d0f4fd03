"""Steps that are captured on a GPU: launching a thousand small kernels one by one takes longer than running them."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def in_place(held: Tensor | None, new: Tensor) -> Tensor:
    """`new`, in the memory of what is `held` where that is alike: recorded steps read it there."""
    if held is None or (held.dtype, held.device, held.shape) != (new.dtype, new.device, new.shape):
        return new
    return held.copy_(new)


def ask(tensor: Tensor) -> Callable[[], list[Any]]:
    """`tensor.tolist`, which waits for what is queued by now, but not for what is queued between this and the call."""
    if not tensor.is_cuda:
        return tensor.tolist
    host = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def answer() -> list[Any]:
        copied.synchronize()
        found: list[Any] = host.tolist()
        return found

    return answer


class Steps:
    """Runs functions that read and write tensors whose place does not change from call to call.

    On a GPU the first call of a key runs as it stands and so warms up, the second is recorded, and from then on it is
    replayed; what it returned keeps its place. A function that reads another's results must run as often as that one
    under each of its keys, or read them from a place of its own. Recorded steps share memory: what one returned lasts
    until a step that was recorded before it runs again. On a CPU every call runs as it stands.
    """

    def __init__(self, device: torch.device, captures: bool = True) -> None:
        self.captures = captures and device.type == "cuda"
        self.scope: Hashable = None  # part of every key: what the steps' shapes depend on
        self.unready = 0  # calls that warmed up or recorded, which takes longer than a replay
        self._seen: set[Hashable] = set()
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._pool: Any = None  # memory that the recorded steps share: they never run at once
        self._side: tuple[Any, Steps] | None = None  # the stream and the steps of `beside`
        self._running: Callable[[], object] | None = None  # and what was last begun there

    def run(self, key: Hashable, step: Callable[[], T]) -> T:
        key = (self.scope, key)
        if not self.captures or key not in self._seen:
            self.unready += self.captures
            self._seen.add(key)
            return step()
        if key not in self._graphs:
            self.unready += 1
            graph = torch.cuda.CUDAGraph()
            # other threads (a collective's watchdog, a reader of states) may go on meanwhile
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                recorded = step()
            self._pool = self._pool or graph.pool()
            self._graphs[key] = (graph, recorded)
        graph, recorded = self._graphs[key]
        graph.replay()
        return recorded

    def beside(self, key: Hashable, step: Callable[[], object]) -> None:
        """Run a step behind all that was queued so far, but beside what comes until `join`: nothing of that may write
        what it reads, or read or write what it writes; so where it reads what a recorded step returned, only steps that
        were recorded after that one may come before `join`. On a CPU it runs at once."""
        if not self.captures:
            step()
            return
        self.join()
        if self._side is None:  # a pool of its own: steps that share one may not run at once
            self._side = torch.cuda.Stream(), Steps(torch.device("cuda"))
        stream, steps = self._side
        stream.wait_stream(torch.cuda.current_stream())
        steps.scope = self.scope
        with torch.cuda.stream(stream):
            steps.run(key, step)
        self.unready, steps.unready = self.unready + steps.unready, 0
        self._running = step  # holds what it reads: memory let go could be taken while the other stream reads it

    def join(self) -> None:
        """Whatever comes waits for what runs beside, if anything does."""
        if self._side is not None and self._running is not None:
            torch.cuda.current_stream().wait_stream(self._side[0])
            self._running = None
