"""Writes a share of a store, in a process of its own: write_states.py MODEL_FOLDER ROOT RANK RANKS [SECONDS_A_SHARD]"""

import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from data_prep import states
from data_prep.rows import Rows, make_rows
from data_prep.state_store import Layout
from models.target import Target, load_target
from recipes.schema import TargetConfig

LENGTHS = [9, 14, 20, 31, 12, 60, 25, 60, 16, 11, 22, 28, 2, 1, 40, 33, 50, 18]


def rows(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> Rows:
    """Random tokens: a prompt of 3 and an answer, in longer rows a second turn; every seventh row answers nothing."""
    draw, out = random.Random(seed), []
    for number, length in enumerate(lengths):
        ids = [draw.randrange(320) for _ in range(length)]
        marks = [0] * 3 + [1] * (length - 3)
        if length > 15:
            marks[length // 2 : length // 2 + 2] = [0, 0]
            marks[length // 2 + 2 :] = [2] * (length - length // 2 - 2)
        out.append((ids, [0] * length if number % 7 == 6 else marks[:length]))
    return make_rows(out, [{} for _ in out])


def layout(target: Target, root: Path, of: Rows | None = None, kind: str = "bf16") -> Layout:
    of = of or rows()
    return Layout(root, of, target.fingerprint, target.hidden_size, target.taps, torch.float32, kind)


if __name__ == "__main__":
    model, root, rank, ranks = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    pause = float((sys.argv[5:] or ["0"])[0])
    target = load_target(TargetConfig(path=model))
    whole = states.write_shard

    def slowly(*arguments: Any) -> None:
        time.sleep(pause)
        whole(*arguments)

    with patch.object(states, "write_shard", slowly):
        store = layout(target, root)
        states.write(store, store.missing(), lambda: target, rank, ranks)
