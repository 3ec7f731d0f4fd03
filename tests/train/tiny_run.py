"""A run on a tiny random target with hand-made rows; as a script, what the launch tests start in several processes:

tiny_run.py MODEL_FOLDER RUN_DIR PROCESSES [STOP_AFTER_STEP]
"""

import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from data_prep.rows import Rows, make_rows
from models.eagle3 import Eagle3, Eagle3Config
from models.target import Target, load_target
from models.vocab import VocabMap
from recipes.schema import EagleConfig, Recipe, TargetConfig, TrainConfig
from train import warm_start
from train.loop import Loop, make_accelerator
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
    """Ends right after the checkpoint of a given step, as a kill would."""

    stop_after = 0

    def _save(self) -> None:
        super()._save()
        if self.state.cursor.step == self.stop_after:
            raise Stop


def run(target: Target, run_dir: Path, data: Rows | None = None, stop_after: int = 0, **train: Any) -> StoppingLoop:
    """One (part of a) run; returns the loop, whose `objective` has been trained."""
    run_dir.mkdir(exist_ok=True)
    accelerator = make_accelerator(torch.device("cpu"), 0.5)
    loop = StoppingLoop(recipe(**train), objective(target), data or rows(), accelerator, run_dir)
    loop.stop_after = stop_after
    try:
        loop.run(IDENTITY, None, {})
    except Stop:
        print(f"stopped after step {stop_after}")
    return loop


if __name__ == "__main__":
    folder, run_dir, processes = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    loop = run(
        load_target(TargetConfig(path=str(folder))), run_dir, stop_after=int((sys.argv[4:] or ["0"])[0]), save_every=4
    )
    assert loop.accelerator.num_processes == processes
    loop.accelerator.end_training()
