"""The target on this machine as the writer of questions and answers: the batched generator of `models`."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from data_prep.progress import meter
from data_prep.writer import Begin, Done, Request, noise_seed
from models.device import choose_dtype
from models.generate import generate
from models.target import Target

WAVES = 16  # rows of a shard for each row decoded at a time: enough that the emptying at its end costs little
PROBE_SECONDS = 0.02
SCORED = 512  # tokens whose laws over the vocabulary are held at a time

Loader = Callable[[torch.dtype], Target]


class Local:
    """The target is loaded when the first word is asked of it. Outputs depend on the shard, the seed and the schedule
    (slots and dtype) alone: the noise of a sampled row on its place in the shard and its position."""

    def __init__(self, loader: Loader, device: torch.device, dtype: str, slots: int) -> None:
        self.loader, self.device, self.slots = loader, device, slots
        self.dtype = generation_dtype(dtype, device)
        self._target: Target | None = None

    @property
    def target(self) -> Target:
        if self._target is None or self._target.dtype != self.dtype:
            self._target = self.loader(self.dtype)
            print(f"data: the target is loaded in {_name(self.dtype)} on {self._target.device}", flush=True)
        return self._target

    def describe(self) -> dict[str, Any]:
        kind = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        schedule = {"slots": self.slots, "dtype": _name(self.dtype), "device": kind}
        return {"writer": "engine", "rows_a_shard": WAVES * self.slots, **schedule}

    def follow(self, manifest: Mapping[str, Any]) -> None:
        self.slots, self.dtype = int(manifest["slots"]), choose_dtype(str(manifest["dtype"]), self.device)

    def write(self, requests: list[Request], stop_ids: frozenset[int], seed: int, label: str) -> list[list[int] | None]:
        with meter(label, len(requests)) as progress:
            return [
                *generate(
                    self.target,
                    [r.prompt for r in requests],
                    max_new_tokens=[r.limit for r in requests],
                    temperatures=[r.temperature for r in requests],
                    slots=self.slots,
                    seed=seed,
                    stop_ids=stop_ids,
                    progress=progress,
                )
            ]

    def answer(self, shards: Mapping[int, range], begin: Begin, seed: int, done: Done) -> None:
        for number, span in shards.items():
            dialogues, turn = begin(span), 0
            while ready := [d for d in dialogues if d.ask()]:
                requests = [Request(d.ids, d.budget, d.temperature) for d in ready]
                label = f"the target answers, shard {number + 1}" + (f", turn {turn + 1}" if turn else "")
                noise = noise_seed(seed, number, turn)
                answers = self.write(requests, ready[0].terms.stop_ids, noise, label)
                for dialogue, answer in zip(ready, answers, strict=True):
                    dialogue.take(answer)
                turn += 1
            done(number, dialogues, {})

    @torch.no_grad()
    def logprobs(self, rows: list[tuple[list[int], int]]) -> list[float] | None:
        target, means = self.target, []
        for ids, start in rows:
            states = target.features(torch.tensor([ids], device=target.device)).final_BTH[0]
            total = 0.0
            for i in range(start, len(ids), SCORED):
                part = ids[i : i + SCORED]
                law = target.logits(states[i - 1 : i - 1 + len(part)]).float().log_softmax(-1)
                total += float(law.gather(1, torch.tensor(part, device=law.device).unsqueeze(1)).sum())
            means.append(total / (len(ids) - start))
        return means


def generation_dtype(setting: str, device: torch.device) -> torch.dtype:
    """`data.dtype`; auto = bfloat16 on a GPU, and on a CPU where a short timed product says that it is faster there."""
    if setting != "auto" or device.type != "cpu":
        return choose_dtype(setting, device)
    return torch.bfloat16 if _product_seconds(torch.bfloat16) < _product_seconds(torch.float32) else torch.float32


def _product_seconds(dtype: torch.dtype) -> float:
    """Best time of a product of the shape that batched decoding has, over a few hundredths of a second."""
    a, b = torch.ones(32, 768, dtype=dtype), torch.ones(768, 2048, dtype=dtype)
    _ = a @ b  # the first call sets the kernel up
    best, end = float("inf"), time.perf_counter() + PROBE_SECONDS / 2
    while (began := time.perf_counter()) < end:
        _ = a @ b
        best = min(best, time.perf_counter() - began)
    return best


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
