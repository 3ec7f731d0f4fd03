"""What stops a run: a loss or a gradient that is no number, or a loss far above those before. The batch is kept."""

import math
from collections import deque
from pathlib import Path
from statistics import median
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from data_prep.rows import Rows
from recipes.files import whole_folder, write_json
from train.batches import Pack, load_batch

MEMORY = 50  # steps whose losses are compared with

LOOK = 'python -c "from safetensors.torch import load_file; print(load_file({path!r}))"'


class Guard:
    """Looks at every step's loss, that of all ranks together, so that all of them stop at the same step.

    A spike is a loss above `factor` times the median of the 50 steps before; nothing is one during warm-up or before
    50 steps were seen, nor with a factor of 0. What was seen goes into the checkpoints.
    """

    def __init__(self, factor: float, warmup: int) -> None:
        self.factor, self.warmup = factor, warmup
        self.losses: deque[float] = deque(maxlen=MEMORY)

    def fault(self, step: int, loss: float, norm: float) -> str | None:
        """What is wrong with optimiser step `step` (from 1), None where nothing is."""
        if not math.isfinite(loss):
            return f"the loss of step {step} is not a number"
        if not math.isfinite(norm):
            return f"the gradient of step {step} is not a number"
        usual = median(self.losses) if len(self.losses) == MEMORY and step > self.warmup else math.inf
        if self.factor and loss > self.factor * usual:
            return f"the loss of step {step} is {loss:.4g}, {loss / usual:.1f} times the median of the {MEMORY} before"
        self.losses.append(loss)
        return None


def keep_batch(run_dir: Path, rows: Rows, shares: list[list[Pack]], about: dict[str, Any]) -> Path:
    """Write the micro-batches of a step (of every rank) to stopped/step-N: tokens and answer marks as they were run,
    and step.json with `about` and the indices of their rows. The safetensors file."""
    folder = run_dir / "stopped" / f"step-{about['step']}"
    tensors: dict[str, Tensor] = {}
    listed = []
    for rank, share in enumerate(shares):
        for number, pack in enumerate(share):
            batch, name = load_batch(rows, pack), f"rank-{rank}/{number}"
            tensors |= {f"{name}/ids": batch.ids_T, f"{name}/answer": batch.answer_T}
            listed.append({"name": name, "rows": pack, "lengths": batch.lengths})
    with whole_folder(folder) as aside:
        save_file(tensors, aside / "batch.safetensors")
        said = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in about.items()}
        write_json(aside / "step.json", said | {"micro_batches": listed})
    return folder / "batch.safetensors"
