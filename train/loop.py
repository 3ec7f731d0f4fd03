"""The training loop every drafter family shares: one device, DDP or DeepSpeed ZeRO-1/2, the same figures from each.

A family brings an Objective (train/objective.py) and its rows; the loop brings batches, normalisation over the whole
optimiser step, the schedule, clipping, checkpoints, metrics and the progress line.
"""

import gc
import math
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import DistributedType, broadcast_object_list
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from data_prep.rows import Rows
from recipes.schema import Recipe, TrainConfig, UserError
from train.batches import Schedule, Step, Usage, deal, load_batch
from train.checkpoint import State, Store, gather, restore_optimizer
from train.objective import Objective
from train.tracking import Tracking

# Rank 0 prepares data, evaluates and waits for nobody; the others wait for it this long before they call it dead.
PATIENCE = timedelta(hours=12)

Score = Callable[[int], float | None]  # step -> validation tau; called on the main process after each epoch


def make_accelerator(device: torch.device, clip: float) -> Accelerator:
    """One for the whole process; make it after the target is loaded (ZeRO-3 would partition the target).

    Mixed precision is the objective's own autocast over fp32 parameters, the same under every backend, so accelerate
    and DeepSpeed are told "no"; clipping is the recipe's, whatever the config file says.
    """
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    cpu = device.type == "cpu"
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    group = InitProcessGroupKwargs(backend="gloo" if cpu else None, timeout=PATIENCE)
    handlers = [group] if launched > 1 or deepspeed else []  # a group of one process alone is not set up by accelerate
    accelerator = Accelerator(cpu=cpu and not deepspeed, mixed_precision="no", kwargs_handlers=handlers)
    if accelerator.num_processes != launched:
        raise UserError(
            f"{launched} processes were launched, but each sees {accelerator.num_processes}: they would train apart. "
            "Launch with one of the files of recipes/accelerate."
        )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        plugin = accelerator.state.deepspeed_plugin
        if plugin.zero_stage > 2:
            raise UserError("DeepSpeed ZeRO-3 is not supported here yet. Use recipes/accelerate/zero2.yaml.")
        plugin.deepspeed_config["gradient_clipping"] = clip
        plugin.deepspeed_config["gradient_accumulation_steps"] = 1  # the loop divides by itself
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1  # DeepSpeed wants a number; the loop batches
    accelerator.gradient_accumulation_steps = 1
    return accelerator


def learning_rate(step: int, total: int, cfg: TrainConfig) -> float:
    """Of optimiser step `step` (from 0): linear warm-up, then a cosine to min_lr x learning_rate."""
    warm = round(cfg.warmup * total)
    if step < warm:
        return cfg.learning_rate * (step + 1) / warm
    progress = (step - warm) / max(1, total - 1 - warm)
    floor = cfg.min_lr
    return cfg.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def make_optimizer(objective: Objective, cfg: TrainConfig) -> torch.optim.AdamW:
    """AdamW over the drafter's fp32 parameters; gains and biases are not decayed."""
    trained = [p for p in objective.drafter.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [{"params": trained}]
    if cfg.weight_decay > 0:
        groups = [{"params": [p for p in trained if p.dim() > 1]}]
        groups.append({"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0})
    betas = (cfg.betas[0], cfg.betas[1])
    return torch.optim.AdamW(
        [g for g in groups if g["params"]], cfg.learning_rate, betas, weight_decay=cfg.weight_decay
    )


@dataclass
class Window:
    """What has been measured since the last log line."""

    sums: list[Tensor] = field(default_factory=list)  # of each optimiser step, this rank's share
    losses: list[Tensor] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)  # of all ranks
    since: float = field(default_factory=time.perf_counter)


class Loop:
    """One run: the objective under its backend, and where it stands."""

    def __init__(
        self, recipe: Recipe, objective: Objective, rows: Rows, accelerator: Accelerator, run_dir: Path
    ) -> None:
        self.recipe, self.cfg, self.objective, self.rows = recipe, recipe.train, objective, rows
        self.accelerator, self.run_dir, self.store = accelerator, run_dir, Store(run_dir, objective.vocab)
        self.schedule = Schedule(rows.lengths, recipe.train, recipe.seed)
        self.state, self.window = State(), Window()
        self.bar: Progress | None = None
        self.last: dict[str, Any] = {}  # the newest log line
        self.saved = -1  # step of the newest checkpoint

    def start(self, identity: dict[str, str]) -> None:
        """Resume or begin, then hand the objective to the backend. Parameters go in before, AdamW's state after."""
        resumed = self.store.resume(identity)
        self.state = resumed or State(identity=identity)
        if resumed is not None:
            self.saved = resumed.cursor.step
            self.objective.drafter.load_state_dict(self.store.model(self.saved))
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            self.store.clean()
        self.optimizer = make_optimizer(self.objective, self.cfg)
        self.model, self.wrapped = self.accelerator.prepare(self.objective, self.optimizer)
        self.engine = self.model if self.accelerator.distributed_type == DistributedType.DEEPSPEED else None
        if resumed is not None:
            moments = self.store.moments(self.saved)
            restore_optimizer(self.objective.drafter, self.optimizer, self.engine, moments, resumed.optimizer_step)

    def run(self, identity: dict[str, str], score: Score | None, config: dict[str, Any]) -> State:
        """Train from wherever the run folder stands to the end; returns the final state (the same on every rank)."""
        self.start(identity)
        main, begun = self.accelerator.is_main_process, self.state.cursor.step
        tracking = Tracking(self.run_dir, begun, self.accelerator, self.cfg.tracker, config) if main else None
        if main and begun:
            print(f"resuming {self.run_dir} at step {begun} of {self.schedule.total}", flush=True)
        if main:
            used = self.packing()
            print(f"packing: micro-batches {used['filled']:.1%} full, padding {used['padding']:.2%}", flush=True)
        with self._progress():
            if self._owes_score():
                self._score(score, tracking)
            self.window = Window()
            for step, after in self.schedule.walk(self.state.cursor):
                norm = self._step(step)
                self.state.cursor = after
                ended = self.schedule.ends_epoch(after)
                saving = ended or after.step % self.cfg.save_every == 0
                if saving or after.step % self.cfg.log_every == 0:
                    self._log(norm, tracking)
                if saving:
                    self._save()
                if ended:
                    self._score(score, tracking)
        if tracking is not None:
            tracking.close()
        self.release()
        return self.state

    def packing(self) -> dict[str, float]:
        """How an epoch's micro-batches are used: train.batches.Usage."""
        return self.schedule.usage(self.accelerator.num_processes).figures

    def release(self) -> None:
        """Let go of the backend's wrapper: a DDP reducer that outlives its process group can hang or abort the exit."""
        self.accelerator.wait_for_everyone()
        self.model = self.engine = self.wrapped = None
        self.accelerator.free_memory()
        gc.collect()

    def _step(self, step: Step) -> Any:
        """One optimiser step, shared among the ranks; returns the gradient norm before clipping."""
        accelerator, cfg, lengths = self.accelerator, self.cfg, self.schedule.lengths
        shares = deal(step, lengths, cfg.micro_batch_tokens, accelerator.num_processes)
        inputs = [self.objective.prepare(load_batch(self.rows, p)) for p in shares[accelerator.process_index]]
        for coming, _ in islice(self.schedule.walk(self.state.cursor), 1, 2):
            later = deal(coming, lengths, cfg.micro_batch_tokens, accelerator.num_processes)
            self.objective.ahead(later[accelerator.process_index])
        local = torch.stack([self.objective.counts(x) for x in inputs]).sum(0)
        counts = accelerator.reduce(local, reduction="sum")
        for group in self.wrapped.param_groups:
            group["lr"] = learning_rate(self.state.cursor.step, self.schedule.total, cfg)
        total, sums = [], []
        for number, x in enumerate(inputs, 1):
            loss, metric = self._backward(x, counts, last=number == len(inputs))
            total.append(loss)
            sums.append(metric)
        norm = self._update()
        self.window.sums.append(torch.stack(sums).sum(0))
        self.window.losses.append(torch.stack(total).sum())
        self.window.usage.add(shares, lengths, cfg.micro_batch_tokens)
        self._check_finite(-2)  # the step before: reading this one's loss would stall a GPU
        return norm

    def _backward(self, x: Any, counts: Tensor, last: bool) -> tuple[Tensor, Tensor]:
        """Forward and backward of one micro-batch.

        The loss is a share of an exact mean over all ranks, so the backend's averaging over ranks is undone.
        """
        quiet = nullcontext() if last or self.engine is not None else self.accelerator.no_sync(self.model)
        with quiet:
            loss, sums = self.model(x, counts)
            scaled = loss * self.accelerator.num_processes
            if self.engine is None:
                self.accelerator.backward(scaled)
            else:
                self.engine.set_gradient_accumulation_boundary(is_boundary=last)
                self.engine.backward(scaled)
        return loss.detach(), sums

    def _update(self) -> Any:
        if self.engine is not None:
            self.engine.step()  # clips, steps and clears
            return self.engine.get_global_grad_norm()
        norm = torch.nn.utils.clip_grad_norm_(self.objective.drafter.parameters(), self.cfg.clip)
        self.wrapped.step()
        self.wrapped.zero_grad()
        return norm

    def _check_finite(self, index: int) -> None:
        losses = self.window.losses
        if len(losses) >= -index and not math.isfinite(float(losses[index])):
            step = self.state.cursor.step + (1 if index == -2 else 0) + index + 1
            kept = (
                f"step-{self.saved} is the newest good checkpoint" if self.saved > 0 else "no checkpoint was saved yet"
            )
            raise UserError(
                f"the loss of step {step + 1} is not a number: training stopped; {kept}. "
                f"Try a lower train.learning_rate (now {self.cfg.learning_rate:g}) or a longer train.warmup."
            )

    def _log(self, norm: Any, tracking: Tracking | None) -> None:
        """Figures since the last line, over all ranks; the loss is the mean of the optimiser steps' losses."""
        self._check_finite(-1)
        window, seconds = self.window, time.perf_counter() - self.window.since
        losses = self.accelerator.reduce(torch.stack(window.losses).sum().double(), reduction="sum") / len(
            window.losses
        )
        sums = self.accelerator.reduce(torch.stack(window.sums).sum(0), reduction="sum")
        figures = self.objective.metrics(sums)
        supervised = figures.pop("supervised", 0)
        step = self.state.cursor.step
        self.last = {
            "epoch": round(self.schedule.epochs_done(self.state.cursor), 4),
            "loss": round(float(losses), 7),
            **figures,
            "lr": learning_rate(step - 1, self.schedule.total, self.cfg),
            "grad_norm": round(float(norm), 5),
            "tokens_per_s": round(window.usage.tokens / seconds, 1),
            "supervised_per_s": round(supervised / seconds, 1),
            **window.usage.figures,
        }
        if self.accelerator.device.type == "cuda":
            self.last["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        left = seconds / len(window.losses) * (self.schedule.total - step)
        self.window = Window()
        if tracking is not None:
            tracking.log(step, self.last)
            self._show(timedelta(seconds=round(left)))

    def _save(self) -> None:
        self._check_finite(-1)
        model, moments, count = gather(self.objective.drafter, self.optimizer, self.engine)
        if not all(bool(t.isfinite().all()) for t in model.values() if t.is_floating_point()):
            raise UserError(
                f"a parameter is not a number after step {self.state.cursor.step}: training stopped, it is not saved. "
                f"Try a lower train.learning_rate (now {self.cfg.learning_rate:g}) or a longer train.warmup."
            )
        self.state.optimizer_step = count
        if self.accelerator.is_main_process:
            self.store.save(self.state, model, moments, self.cfg.keep)
        self.saved = self.state.cursor.step
        self.accelerator.wait_for_everyone()

    def _owes_score(self) -> bool:
        """A kill between the save at an epoch's end and its evaluation leaves the checkpoint without a score."""
        step = self.state.cursor.step
        return self.schedule.ends_epoch(self.state.cursor) and step == self.saved and step not in self.state.scores

    def _score(self, score: Score | None, tracking: Tracking | None) -> None:
        """Measure on the main process, tell the others, and let `best` follow."""
        step = self.state.cursor.step
        told: list[float | None] = [None]
        if self.accelerator.is_main_process and score is not None:
            if self.bar is not None:
                self.bar.update(self.bar.task_ids[0], status="measuring validation tau")
            self.objective.eval()
            told = [score(step)]
            self.objective.train()
        value = broadcast_object_list(told)[0]
        if value is not None:
            self.state.scores[step] = value
        if self.accelerator.is_main_process:
            self.store.record(self.state)
            if tracking is not None and value is not None:
                tracking.log(step, {"validation_tau": value})
                self._say(f"step {step}: validation tau {value:.3f} (best: step {self.state.best()})")
        self.window = Window()

    def _progress(self) -> Any:
        if not self.accelerator.is_main_process or not Console().is_terminal:
            return nullcontext()
        columns = (
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[status]}"),
        )
        self.bar = Progress(*columns)
        self.bar.add_task("", total=self.schedule.total, completed=self.state.cursor.step, status="")
        return self.bar

    def _show(self, left: timedelta) -> None:
        """The newest figures in the bar, or as a line where there is no terminal."""
        line, step = self.last, self.state.cursor.step
        acc = line.get("acc", [])
        spread = f"acc {acc[0]:.3f}..{acc[-1]:.3f} " if acc else ""
        status = (
            f"loss {line['loss']:.4f} {spread}simulated tau {line.get('simulated_tau', 0):.3f} "
            f"lr {line['lr']:.2e} {line['tokens_per_s']:,.0f} tok/s padding {line['padding']:.1%}"
        )
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=step, status=status)
        else:
            print(f"step {step}/{self.schedule.total} {status} ETA {left}", flush=True)

    def _say(self, text: str) -> None:
        (self.bar.console.print if self.bar is not None else print)(text)
