"""What judging a round costs: milliseconds of every acceptance rule on random laws.

    python scripts/bench_rules.py [vocab=151936] [length=8] [paths=4] [batch=1] [rounds=200] [rules=block,traversal]

A round is everything from the laws to the accepted path and the token after it, captured as decoding captures it; the
last lines are what decoding does besides, whatever the rule. Beside the time stand the operations that a round
launches, and how many tensors of the size of all laws [K, L, V] it writes. On a CPU nothing is captured.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from eval.rules import TABLE, Rule, faults, verify
from eval.tree import merged
from eval.verify import Drafts, accept
from models.capture import Steps
from models.device import choose_device
from models.sampling import draw, law, sample

SETS = 3  # of laws, in turn: together more than a GPU's cache holds


class Counter(TorchDispatchMode):
    """Counts operations that launch something, and those that write as much as all laws together. The kernels of
    eval/kernels*.py are launched past torch, and write no whole laws: they are counted one by one."""

    def __init__(self, whole: int) -> None:
        super().__init__()
        self.whole, self.launches, self.copies = whole, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        views = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        written = [x for x in (out if isinstance(out, tuple | list) else [out]) if isinstance(x, Tensor)]
        in_place = func._schema.name.endswith("_")
        new = [x for x in written if in_place or x.untyped_storage().data_ptr() not in views]
        if new and "empty" not in func._schema.name:
            self.launches += 1
            self.copies += any(x.numel() >= self.whole for x in new)
        return out

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self)
            if device.type == "cuda":
                from triton.runtime.jit import JITFunction

                real = JITFunction.run

                def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
                    self.launches += 1
                    return real(kernel, *args, **kwargs)

                stack.enter_context(patch.object(JITFunction, "run", run))
            yield


def random_drafts(
    seed: int, batch: int, paths: int, length: int, vocab: int, device: torch.device
) -> tuple[Drafts, Tensor]:
    """Paths drawn from laws that are near the target's, as a drafter's are; and the target's logits."""
    source = torch.Generator(device).manual_seed(seed)
    nodes = 1 + paths * length
    logits = 3 * torch.randn(batch, nodes, vocab, generator=source, device=device)
    inner = nodes - paths
    draft = law(logits[:, :inner] + torch.randn(batch, inner, vocab, generator=source, device=device), 1.0)
    tokens = torch.zeros(batch, paths, length, dtype=torch.int64, device=device)
    for d in range(length):
        node = Drafts(tokens[..., :d], draft, draft, tokens).nodes[..., -1] if d else torch.zeros_like(tokens[..., 0])
        uniforms = torch.rand(batch, paths, generator=source, device=device, dtype=torch.float64)
        here = draft.gather(1, node.unsqueeze(2).expand(-1, -1, vocab))
        tokens[..., d] = draw(here.double(), uniforms)
    coins = torch.rand(batch, paths, length, generator=source, device=device, dtype=torch.float64)
    return Drafts(tokens, draft, law(logits, 1.0), coins), logits


def match(drafts: Drafts, logits: Tensor, uniforms_BN: Tensor) -> Any:
    """Sample-and-match, as decoding does it: the target's own token after every node, and a walk."""
    zeros = torch.zeros_like(drafts.tokens[:, 0, 0])
    return accept(merged(zeros, drafts.tokens), sample(logits, 1.0, 0, 1.0, uniforms_BN), None, zeros, zeros)


def milliseconds(step: Callable[[int], Any], rounds: int, device: torch.device) -> float:
    """Median of a round; on a GPU of ten rounds at a time, since a clock's tick is a part of one."""
    times = []
    for start in range(0, rounds, 10):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for i in range(start, start + 10):
            step(i % SETS)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(100 * (time.perf_counter() - begin))
    return statistics.median(times)


def _by_rule(rule: Rule, coins: Tensor, drafts: Drafts, logits: Tensor) -> Any:
    return verify(rule, drafts, coins)


def main(argv: list[str]) -> None:
    options = {
        "vocab": "151936",
        "length": "8",
        "paths": "4",
        "batch": "1",
        "rounds": "200",
        "rules": "",
        "device": "auto",
    }
    options |= dict(a.split("=", 1) for a in argv)
    device = choose_device(options["device"])
    vocab, length, paths, batch = (int(options[key]) for key in ("vocab", "length", "paths", "batch"))
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}: V = {vocab}, L = {length}, batch {batch}, fp32 laws, {options['rounds']} rounds", flush=True)
    print(f"{'rule':>14}{'paths':>7}{'ms':>9}{'launches':>10}{'whole-law writes':>18}")
    made = {k: [random_drafts(i, batch, k, length, vocab, device) for i in range(SETS)] for k in sorted({1, paths})}
    uniforms = torch.rand(batch, 1 + length * paths, device=device, dtype=torch.float64)
    chosen = options["rules"].split(",") if options["rules"] else [rule.name for rule in TABLE] + ["match"]
    work: list[tuple[str, int, Callable[[Drafts, Tensor], Any]]] = []
    for rule in TABLE:
        if rule.name in chosen:
            work.append((rule.name, paths if rule.several else 1, partial(_by_rule, rule, uniforms[:, :2])))
    if "match" in chosen:
        work.append(("match", paths, lambda d, logits: match(d, logits, uniforms)))
    work.append(("(faults)", paths, lambda d, _: faults(d)))
    work.append(("(target's law)", paths, lambda _, logits: law(logits, 1.0)))
    for label, k, judge in work:
        steps = Steps(device)
        copies = [Drafts(d.tokens, d.draft, d.target, d.coins) for d, _ in made[k]]

        def step(i: int, k: int = k, label: str = label, judge: Any = judge, steps: Steps = steps) -> Any:
            d, logits = made[k][i]  # a new object a round: what it keeps of itself belongs to the round
            return steps.run((label, i), lambda: judge(Drafts(d.tokens, d.draft, d.target, d.coins), logits))

        judge(copies[0], made[k][0][1])
        counter = Counter(batch * length * k * vocab)
        with counter.on(device):
            judge(copies[1], made[k][1][1])
        for i in range(3 * SETS):
            step(i % SETS)
        cost = milliseconds(step, int(options["rounds"]), device)
        print(f"{label:>14}{k:7}{cost:9.3f}{counter.launches:10}{counter.copies:18}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
