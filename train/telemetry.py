"""What a training tells of its speed: where the time goes, and how much of the hardware's arithmetic is used.

Arithmetic is counted as the work that is needed, whatever a step really computes: a multiply-add is two operations,
only supervised slots have queries, an MLP and a head, the backward costs twice the forward, attention is taken over
whole documents (windows are not subtracted), and norms, softmaxes and recomputation are free.
"""

import resource
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.eagle3 import Eagle3Config
from models.target import Target

# dense bf16 operations a second by what the name of the GPU holds, the first that does (the makers' data sheets)
PEAKS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
}


class Arithmetic(NamedTuple):
    """Operations of a stretch of training."""

    drafter: float
    target: float


def peak_arithmetic(device: torch.device) -> float | None:
    """bf16 operations a second of a known GPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def drafter_arithmetic(c: Eagle3Config, tokens: int, slots: Sequence[int], pairs: int) -> float:
    """Forward and backward of the unroll: `slots` are the supervised ones of each step among `tokens`, `pairs` the
    (query, key) pairs of causal attention within documents."""
    hidden, wide = c.hidden_size, c.num_attention_heads * c.head_dim
    keys = 2 * c.num_key_value_heads * c.head_dim
    fused = len(c.taps) * hidden * hidden
    # what an embedding says is multiplied once a token, what a state says once a slot; all slots have keys at step 0
    every_token = fused + hidden * (wide + keys) + hidden * keys
    slot = 2 * hidden * wide + 3 * hidden * c.intermediate_size + hidden * c.draft_vocab_size
    total = float(tokens * every_token)
    for step, count in enumerate(slots):
        total += count * (slot + (hidden * keys if step else 0))
        total += 2 * wide * (pairs * count / max(1, tokens) + step * count)
    return 3 * 2 * total


def target_arithmetic(target: Target, tokens: int, teaching: int, pairs: int) -> float:
    """Forward of the frozen target, its head for the teaching positions alone."""
    hidden, wide = target.hidden_size, target.n_heads * target.head_dim
    keys = 2 * target.n_kv * target.head_dim
    layer = hidden * (wide + keys) + wide * hidden + 3 * hidden * int(target.config.intermediate_size)
    head = hidden * target.vocab_size
    return 2.0 * (target.n_layers * (tokens * layer + 2 * wide * pairs) + teaching * head)


class Stopwatch:
    """Seconds by name. On a GPU they are those of the stream, marked by events that are read when asked for, so that
    timing never makes the host wait."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, defaultdict[str, float](float)
        self.marks: list[tuple[str, Any, Any]] = []

    @contextmanager
    def timed(self, name: str, host: bool = False) -> Iterator[None]:
        """`host`: of this process's own clock, on a GPU too."""
        if host or self.device.type != "cuda":
            begun = time.perf_counter()
            yield
            self.seconds[name] += time.perf_counter() - begun
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        end.record()
        self.marks.append((name, start, end))

    def read(self) -> dict[str, float]:
        """Since the last reading. It waits for what was timed."""
        for name, start, end in self.marks:
            end.synchronize()
            self.seconds[name] += start.elapsed_time(end) / 1000
        found = dict(self.seconds)
        self.seconds.clear()
        self.marks.clear()
        return found


class Coming:
    """Two numbers on their way to the host. To read them waits for them alone, not for what a GPU was given after."""

    def __init__(self, one: Tensor, other: Tensor | float) -> None:
        self.rest = [] if isinstance(other, Tensor) else [other]
        sent = [x.detach().double().view(()) for x in (one, other) if isinstance(x, Tensor)]
        self.values = torch.stack(sent).to("cpu", non_blocking=True)
        self.arrived = torch.cuda.Event() if one.is_cuda else None
        if self.arrived is not None:
            self.arrived.record()

    def read(self) -> tuple[float, float]:
        if self.arrived is not None:
            self.arrived.synchronize()
        found = [*self.values.tolist(), *self.rest]
        return found[0], found[1]


def peak_gib(device: torch.device) -> float:
    """Most memory this process has held: on the GPU, or resident on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
