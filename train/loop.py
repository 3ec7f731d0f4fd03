"""The training loop every drafter family shares: one device, DDP or DeepSpeed ZeRO, the same figures from each.

A family brings an Objective (train/objective.py) and its rows; the loop brings batches, normalisation over the whole
optimiser step, the schedule, clipping, checkpoints, metrics and the progress line.
"""

import copy
import gc
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast_object_list
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from data_prep.rows import Rows
from recipes.schema import Recipe, TrainConfig, UserError
from train.backend import clip_parts, clips_parts, fill, gather, make_optimizer, offloads, restore_optimizer, zero_stage
from train.batches import Pack, Schedule, Step, Usage, deal, load_batch
from train.checkpoint import State, Store
from train.guard import LOOK, Guard, keep_batch
from train.objective import Objective
from train.telemetry import Coming, Stopwatch, peak_arithmetic, peak_gib
from train.tracking import Tracking

# drafter -> validation tau; called after each epoch on every process, and the main one's answer counts
Score = Callable[[Any], float | None]


def learning_rate(step: int, total: int, cfg: TrainConfig) -> float:
    """Of optimiser step `step` (from 0): linear warm-up, then a cosine to min_lr x learning_rate."""
    warm = round(cfg.warmup * total)
    if step < warm:
        return cfg.learning_rate * (step + 1) / warm
    progress = (step - warm) / max(1, total - 1 - warm)
    floor = cfg.min_lr
    return cfg.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


@dataclass
class Latest:
    """The optimiser step that was run last."""

    number: int  # from 1
    epoch: int  # from 0, as rows are dealt and what is drawn for them
    shares: list[list[Pack]]
    loss: Tensor  # this rank's share
    norm: Any


@dataclass
class Window:
    """What has been measured since the last log line."""

    sums: list[Tensor] = field(default_factory=list)  # of each optimiser step, this rank's share
    losses: list[float] = field(default_factory=list)  # of each optimiser step, over all ranks
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
        self.state, self.window, self.watch = State(), Window(), Stopwatch(accelerator.device)
        self.guard = Guard(self.cfg.spike, round(self.cfg.warmup * self.schedule.total))
        self.latest: Latest | None = None  # until its loss has been looked at
        # what one process can run alone: the drafter itself, or under ZeRO-3, on the main process, a copy of its own
        self.whole: Any = objective.drafter
        self.bar: Progress | None = None
        self.last: dict[str, Any] = {}  # the newest log line
        self.saved = -1  # step of the newest checkpoint

    def start(self, identity: dict[str, str]) -> None:
        """Resume or begin, then hand the objective to the backend. Parameters go in before, AdamW's state after."""
        resumed = self.store.resume(identity)
        self.state = resumed or State(identity=identity)
        if resumed is not None:
            self.saved = resumed.cursor.step
            self.guard.losses.extend(resumed.losses)
            fill(self.objective.drafter, self.store.model(self.saved))
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            self.store.clean()
            if resumed is not None and resumed.scores:
                self.store.follow(resumed)  # a kill after a score was kept may have left `best` where it was
        if self.accelerator.is_main_process and zero_stage(self.accelerator) == 3:
            self.whole = copy.deepcopy(self.objective.drafter).cpu()  # the parameters are about to be partitioned
        fused = self.accelerator.device.type == "cuda" or offloads(self.accelerator)
        self.optimizer = make_optimizer(self.objective, self.cfg, fused)
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
            self._new_window()
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
        """One optimiser step, shared among the ranks; returns the gradient norm before clipping.

        The loss of the step before is looked at when all of this one is under way: this one's would stall a GPU, and so
        would reading that one only then, behind all that the GPU has been given since.
        """
        accelerator, cfg, lengths = self.accelerator, self.cfg, self.schedule.lengths
        shares = deal(step, lengths, cfg.micro_batch_tokens, accelerator.num_processes)
        epoch, share = self.state.cursor.epoch, shares[accelerator.process_index]
        with self.watch.timed("data", host=True):
            batches = [load_batch(self.rows, pack, epoch) for pack in share]
        with self.watch.timed("data"):  # a GPU waits only where it has done all that it was given
            self.objective.arrive(share)
        with self.watch.timed("target"):
            inputs = [self.objective.prepare(batch) for batch in batches]
        for coming, _ in islice(self.schedule.walk(self.state.cursor), 1, 2):
            later = deal(coming, lengths, cfg.micro_batch_tokens, accelerator.num_processes)
            self.objective.ahead(later[accelerator.process_index])
        local = torch.stack([self.objective.counts(x) for x in inputs]).sum(0)
        before, told = self.latest, None
        if before is None:
            counts = accelerator.reduce(local, reduction="sum")
        else:
            both = accelerator.reduce(torch.cat([local.double(), before.loss.view(1)]), reduction="sum")
            counts, told = both[:-1].to(local.dtype), Coming(both[-1], before.norm)
        for group in self.wrapped.param_groups:
            group["lr"] = learning_rate(self.state.cursor.step, self.schedule.total, cfg)
        total, sums = [], []
        with self.watch.timed("drafter"):
            for number, x in enumerate(inputs, 1):
                loss, metric = self._backward(x, counts, last=number == len(inputs))
                total.append(loss)
                sums.append(metric)
            norm = self._update()
        self.window.sums.append(torch.stack(sums).sum(0))
        self.window.usage.add(shares, lengths, cfg.micro_batch_tokens)
        if before is not None and told is not None:
            self._look(before, told)
        self.latest = Latest(self.state.cursor.step + 1, epoch, shares, torch.stack(total).sum().double(), norm)
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
            norm = clip_parts(self.engine, self.cfg.clip) if clips_parts(self.accelerator) else None
            self.engine.step()  # steps and clears; clips where that is its own
            return self.engine.get_global_grad_norm() if norm is None else norm
        norm = torch.nn.utils.clip_grad_norm_(self.objective.drafter.parameters(), self.cfg.clip)
        self.wrapped.step()
        self.wrapped.zero_grad()
        return norm

    def _settle(self) -> None:
        """Look at the newest step's loss too."""
        if self.latest is not None:
            loss = self.accelerator.reduce(self.latest.loss, reduction="sum")
            self._look(self.latest, Coming(loss, self.latest.norm))
            self.latest = None

    def _look(self, one: Latest, told: Coming) -> None:
        found, norm = told.read()
        self.window.losses.append(found)
        fault = self.guard.fault(one.number, found, norm)
        if fault is None:
            return
        rate = learning_rate(one.number - 1, self.schedule.total, self.cfg)
        about = {"step": one.number, "epoch": one.epoch, "why": fault, "loss": found, "grad_norm": norm}
        where = self.run_dir / "stopped" / f"step-{one.number}" / "batch.safetensors"
        if self.accelerator.is_main_process:
            keep_batch(self.run_dir, self.rows, one.shares, about | {"learning_rate": rate})
        kept = f"step-{self.saved} is the newest good checkpoint" if self.saved > 0 else "no checkpoint was saved yet"
        spiked = math.isfinite(found) and math.isfinite(norm)
        online = self.recipe.data.states == "none"
        stored = "" if online else " Or the target's states on disk are damaged (data.states)."
        raise UserError(
            f"{fault}: training stopped; {kept}. Its batch is in {where} (step.json beside it names the rows):\n"
            f"  {LOOK.format(path=str(where))}\n"
            f"Try a lower train.learning_rate (now {self.cfg.learning_rate:g}) or a longer train.warmup, in another "
            f"run_dir" + (", or go on past it here with train.spike=0." if spiked else ".") + stored
        )

    def _log(self, norm: Any, tracking: Tracking | None) -> None:
        """Figures since the last line, over all ranks; the loss is the mean of the optimiser steps' losses."""
        self._settle()
        window, seconds = self.window, time.perf_counter() - self.window.since
        sums = self.accelerator.reduce(torch.stack(window.sums).sum(0), reduction="sum")
        figures = self.objective.metrics(sums)
        supervised = figures.pop("supervised", 0)
        step = self.state.cursor.step
        self.last = {
            "epoch": round(self.schedule.epochs_done(self.state.cursor), 4),
            "loss": round(fmean(window.losses), 7),
            **figures,
            "lr": learning_rate(step - 1, self.schedule.total, self.cfg),
            "grad_norm": round(float(norm), 5),
            "tokens_per_s": round(window.usage.tokens / seconds, 1),
            "supervised_per_s": round(supervised / seconds, 1),
            **self._speed(sums, seconds),
            **window.usage.figures,
        }
        left = seconds / len(window.losses) * (self.schedule.total - step)
        self._new_window()
        if tracking is not None:
            tracking.log(step, self.last)
            self._show(timedelta(seconds=round(left)))

    def _speed(self, sums: Tensor, seconds: float) -> dict[str, float]:
        """Shares of the window's time on this process (what neither model takes is the rest), memory, and where the
        hardware is known the share of its arithmetic that is used."""
        timed, usage, device = self.watch.read(), self.window.usage, self.accelerator.device
        found = {f"{name}_time": round(timed.get(name, 0.0) / seconds, 4) for name in ("data", "target", "drafter")}
        found["peak_gib"] = round(peak_gib(device), 2)
        work = self.objective.arithmetic(sums, usage.tokens, usage.pairs)
        found["drafter_tflops"] = round(work.drafter / seconds / 1e12, 4)
        found["target_tflops"] = round(work.target / seconds / 1e12, 4)
        if peak := peak_arithmetic(device):
            found["of_peak"] = round(sum(work) / seconds / peak / self.accelerator.num_processes, 4)
        return found

    def _new_window(self) -> None:
        self.window = Window()
        self.watch.read()

    def _save(self) -> None:
        self._settle()
        model, moments, count = gather(self.objective.drafter, self.optimizer, self.engine)
        if not all(bool(t.isfinite().all()) for t in model.values() if t.is_floating_point()):
            raise UserError(
                f"a parameter is not a number after step {self.state.cursor.step}: training stopped, it is not saved. "
                f"Try a lower train.learning_rate (now {self.cfg.learning_rate:g}) or a longer train.warmup."
            )
        self.state.optimizer_step, self.state.losses = count, [*self.guard.losses]
        if self.accelerator.is_main_process:
            self.store.save(self.state, model, moments, self.cfg.keep)
        self.saved = self.state.cursor.step
        self.accelerator.wait_for_everyone()

    def _owes_score(self) -> bool:
        """A kill between the save at an epoch's end and its evaluation leaves the checkpoint without a score."""
        step = self.state.cursor.step
        return self.schedule.ends_epoch(self.state.cursor) and step == self.saved and step not in self.state.scores

    def _score(self, score: Score | None, tracking: Tracking | None) -> None:
        """Measure, take the main process's word for it, and let `best` follow."""
        step = self.state.cursor.step
        told: list[float | None] = [None]
        if score is not None:
            if self.bar is not None:
                self.bar.update(self.bar.task_ids[0], status="measuring validation tau")
            told = [score(self._drafter(step))]
            self.whole.train()
            if self.whole is not self.objective.drafter:
                self.whole.cpu()
        value = broadcast_object_list(told)[0]
        if value is not None:
            self.state.scores[step] = value
        if self.accelerator.is_main_process:
            self.store.record(self.state)
            if tracking is not None and value is not None:
                tracking.log(step, {"validation_tau": value})
                self._say(f"step {step}: validation tau {value:.3f} (best: step {self.state.best()})")
        self._new_window()

    def _drafter(self, step: int) -> Any:
        """Of the checkpoint that was just saved, as one process can run it."""
        if self.whole is not self.objective.drafter:
            fill(self.whole, self.store.model(step))
            self.whole.to(self.accelerator.device)
        return self.whole.eval()

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
            f"lr {line['lr']:.2e} {line['tokens_per_s']:,.0f} tok/s ({line['supervised_per_s']:,.0f} supervised) "
            f"target {line['target_time']:.0%} drafter {line['drafter_time']:.0%} data {line['data_time']:.0%} "
            f"padding {line['padding']:.1%} {line['peak_gib']:.1f} GiB"
        )
        if "of_peak" in line:
            status += f" {line['of_peak']:.0%} of peak"
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=step, status=status)
        else:
            print(f"step {step}/{self.schedule.total} {status} ETA {left}", flush=True)

    def _say(self, text: str) -> None:
        (self.bar.console.print if self.bar is not None else print)(text)
