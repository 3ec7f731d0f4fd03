"""A run on a tiny random target with hand-made rows."""

import random
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from data_prep.rows import Rows, make_rows
from models.eagle3 import Eagle3, Eagle3Config
from models.target import Target
from models.vocab import VocabMap
from recipes.schema import EagleConfig, Recipe, TrainConfig
from train import warm_start
from train.backend import make_accelerator, zero_stage
from train.loop import Loop
from train.objective import UnrollLoss

IDENTITY = {"train.epochs": "2", "data.hash": "abc"}
STEPS = 3
VOCAB = 320
LENGTHS = [9, 14, 20, 31, 12, 60, 25, 60, 16, 11, 22, 28]  # a row of 60 makes a step of its own: one rank goes empty


def rows(lengths: list[int] = LENGTHS, seed: int = 0) -> Rows:
    """Random tokens; a prompt of 3, an answer, and in longer rows a second turn."""
    draw = random.Random(seed)
    out = []
    for length in lengths:
        ids = [draw.randrange(VOCAB) for _ in range(length)]
        second = 2 * length // 3 if length > 15 else length
        out.append(
            (ids, [0] * 3 + [1] * (second - 3) + ([0] * 2 + [2] * (length - second - 2) if second < length else []))
        )
    return make_rows(out, [{} for _ in out])


def vocab() -> VocabMap:
    return VocabMap.from_ids([t for t in range(VOCAB) if t % 5], VOCAB)


def recipe(**train: Any) -> Recipe:
    values: dict[str, Any] = {
        "epochs": 2,
        "batch_tokens": 60,
        "micro_batch_tokens": 40,
        "learning_rate": 3e-3,
        "log_every": 1,
        "tracker": "none",
    }
    return Recipe(train=TrainConfig(**(values | train)), eagle=EagleConfig(unroll_steps=STEPS))


def objective(
    target: Target, kept: VocabMap | None = None, seed: int = 0, keep_bytes: int = 2**20, **eagle: Any
) -> UnrollLoss:
    kept = kept or vocab()
    torch.manual_seed(seed)
    flags = {name: value for name, value in eagle.items() if name in warm_start.FLAGS}
    drafter = Eagle3(Eagle3Config.from_target(target, kept, **flags), kept)
    drafter.init_from_target(target)
    return UnrollLoss(drafter, target, kept, EagleConfig(unroll_steps=STEPS, **eagle), keep_bytes=keep_bytes)


class Stop(Exception):
    pass


class StoppingLoop(Loop):
    """Ends right after the checkpoint of a given step, as a kill would; shows other losses than it has."""

    stop_after = 0
    spoil: Mapping[int, float] = MappingProxyType({})  # step -> factor, on the last process alone

    def _backward(self, x: Any, counts: Tensor, last: bool) -> tuple[Tensor, Tensor]:
        loss, sums = super()._backward(x, counts, last)
        spoilt = self.accelerator.process_index == self.accelerator.num_processes - 1
        return loss * (self.spoil.get(self.state.cursor.step + 1, 1.0) if spoilt else 1.0), sums

    def _save(self) -> None:
        super()._save()
        if self.state.cursor.step == self.stop_after:
            raise Stop


def accelerator(clip: float = 0.5) -> Accelerator:
    """Under ZeRO-3 the smallest parameters are partitioned too: by its own settings all of these would stay whole."""
    made = make_accelerator(torch.device("cpu"), clip)
    if zero_stage(made) == 3:
        zero = made.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
        zero["stage3_param_persistence_threshold"] = 0
    return made


def run(
    target: Target,
    run_dir: Path,
    data: Rows | None = None,
    stop_after: int = 0,
    identity: dict[str, str] = IDENTITY,
    spoil: dict[int, float] | None = None,
    **train: Any,
) -> StoppingLoop:
    """One (part of a) run; returns the loop, whose `objective` has been trained."""
    run_dir.mkdir(exist_ok=True)
    keep = 0 if target.sharded else 2**20
    trained = objective(target, keep_bytes=keep)
    trained.recompute = bool(train.get("recompute"))
    asked = recipe(**train)
    loop = StoppingLoop(asked, trained, data or rows(), accelerator(asked.train.clip), run_dir)
    loop.stop_after, loop.spoil = stop_after, spoil or {}
    try:
        loop.run(identity, None, {})
    except Stop:
        print(f"stopped after step {stop_after}")
    return loop
