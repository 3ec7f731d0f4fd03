"""Train an EAGLE-3 drafter for a recipe's target, and say what it is worth.

    accelerate launch train/eagle.py recipe=smollm2 [run_dir=DIR] [key=value ...]
    python train/eagle.py recipe=smollm2 dry_run=true

The same command again goes on where the run folder stands.
"""

import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from math import ceil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # run as a file, from any folder
if sys.path and Path(sys.path[-1]).resolve() == Path(__file__).resolve().parent:
    sys.path.pop()

import torch
from accelerate.utils import broadcast_object_list
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from data_prep.prompts import load_prompts
from data_prep.run import Prepared, load_prepared, prepare
from data_prep.sources import SourceCost, check_sources
from eval import harness
from models.eagle3 import Eagle3, Eagle3Config
from models.layouts import save_drafter
from models.source import Source, resolve
from models.target import Target, check_taps, choose_device, choose_dtype, load_target
from recipes.cli import entry
from recipes.files import make_folder, write_json, write_text
from recipes.schema import Recipe, UserError, save
from train.checkpoint import State, Store, refuse_change, run_identity
from train.loop import Loop, make_accelerator
from train.objective import UnrollLoss

VERSIONS = ("torch", "transformers", "accelerate", "deepspeed", "safetensors")


def main(recipe: Recipe) -> None:
    check(recipe)
    folder = run_folder(recipe)
    costs = check_sources(recipe)
    source = resolve(recipe.target)
    check_taps(recipe.target.taps, source.n_layers)
    if recipe.dry_run:
        print(OmegaConf.to_yaml(OmegaConf.structured(recipe)))
        print(SourceCost.table(costs))
        print(cost(recipe, source, sum(max(0, c.prompts) for c in costs)))
        return
    make_folder(folder)
    if finished(recipe, folder, source):
        return
    torch.manual_seed(recipe.seed)
    device = local_device(recipe)
    dtype = choose_dtype(recipe.target.dtype, device)
    target = load_target(recipe.target, device, dtype)
    # before the accelerator exists, so that the other ranks wait where they are told how long
    prepared = prepare(recipe, loader(recipe, target), source) if rank() == 0 else None
    accelerator = make_accelerator(device, recipe.train.clip)
    told = broadcast_object_list([str(prepared.folder) if prepared else ""])
    prepared = prepared or shared(Path(told[0]))
    identity = identify(recipe, source, prepared)
    if accelerator.is_main_process:
        Store(folder).resume(identity)  # refuses another run before anything of this one is written
        begin(recipe, folder, source, prepared)
    drafter = Eagle3(Eagle3Config.from_target(target, prepared.vocab), prepared.vocab)
    drafter.init_from_target(target)
    steps, decay = recipe.eagle.unroll_steps, recipe.eagle.step_decay
    objective = UnrollLoss(drafter, target, prepared.vocab, steps, decay, bf16=use_bf16(recipe, device))
    loop = Loop(recipe, objective, prepared.train, accelerator, folder)

    def score(step: int) -> float:
        return harness.validation_tau(recipe, target, drafter, prepared.validation_prompts)

    wanted = recipe.eval.each_epoch and len(prepared.validation_prompts) > 0
    began = time.perf_counter()
    state = loop.run(identity, score if wanted else None, asdict(recipe))
    if accelerator.is_main_process:
        seconds = time.perf_counter() - began
        finish(recipe, folder, source, prepared, target, drafter, state, loop.last | {"train_seconds": round(seconds, 1)})
    accelerator.end_training()


def check(recipe: Recipe) -> None:
    """What `train` and `eagle` can get wrong, by key."""
    t, e = recipe.train, recipe.eagle
    least = {
        "train.epochs": (t.epochs, 1), "train.max_steps": (t.max_steps, 0), "train.batch_tokens": (t.batch_tokens, 1),
        "train.micro_batch_tokens": (t.micro_batch_tokens, 1), "train.save_every": (t.save_every, 1),
        "train.keep": (t.keep, 1), "train.log_every": (t.log_every, 1), "eagle.unroll_steps": (e.unroll_steps, 1),
        "eagle.draft_vocab": (e.draft_vocab, 0),
    }  # fmt: skip
    for key, (value, minimum) in least.items():
        if value < minimum:
            raise UserError(f"{key}={value} must be at least {minimum}")
    above = {"train.learning_rate": t.learning_rate, "train.clip": t.clip, "eagle.step_decay": e.step_decay}
    for key, number in above.items():
        if not number > 0:
            raise UserError(f"{key}={number} must be above 0")
    for key, share in {"train.warmup": t.warmup, "train.min_lr": t.min_lr}.items():
        if not 0 <= share <= 1:
            raise UserError(f"{key}={share} must lie in 0..1: it is a share")
    if len(t.betas) != 2 or not all(0 <= b < 1 for b in t.betas):
        raise UserError(f"train.betas={list(t.betas)} must be two numbers in 0..1")
    if t.precision not in ("auto", "bf16", "fp32"):
        raise UserError(f"train.precision={t.precision!r} is not one of auto, bf16, fp32")
    if t.tracker not in ("wandb", "none"):
        raise UserError(f"train.tracker={t.tracker!r} is not one of wandb, none")


def run_folder(recipe: Recipe) -> Path:
    return Path(recipe.run_dir).expanduser() if recipe.run_dir else Path("runs") / Path(recipe.recipe).stem


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def local_device(recipe: Recipe) -> torch.device:
    """The GPU that accelerate will give this process, known before accelerate is asked."""
    device = choose_device(recipe.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    return device


def use_bf16(recipe: Recipe, device: torch.device) -> bool:
    return device.type == "cuda" if recipe.train.precision == "auto" else recipe.train.precision == "bf16"


def loader(recipe: Recipe, target: Target) -> Callable[[torch.dtype], Target]:
    """The loaded target where its dtype is the wanted one, else another copy."""
    return lambda dtype: target if dtype == target.dtype else load_target(recipe.target, target.device, dtype)


def shared(folder: Path) -> Prepared:
    if not folder.is_dir():
        raise UserError(
            f"{folder} was prepared by the first process, but this machine does not see it. "
            "Set data.cache to a folder that all machines share."
        )
    return load_prepared(folder)


def cost(recipe: Recipe, source: Source, rows: int) -> str:
    """What training will take, from the recipe and the target's config alone (upper bounds)."""
    config = json.loads((source.folder / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    size = parameters(config, recipe.eagle.draft_vocab, len(recipe.target.taps) or 3)
    t, slots = recipe.train, recipe.train.micro_batch_tokens
    tokens = rows * recipe.data.max_length
    steps = t.max_steps or t.epochs * ceil(tokens / t.batch_tokens)
    vocab = recipe.eagle.draft_vocab or int(config["vocab_size"])
    wide = 2 if use_bf16(recipe, choose_device(recipe.device)) else 4
    logits = (recipe.eagle.unroll_steps + 3) * slots * vocab * wide
    features = t.batch_tokens * (len(recipe.target.taps) + 1 or 4) * int(config["hidden_size"]) * wide
    return (
        "training will cost (upper bounds):\n"
        f"  drafter: {size:,} parameters to train, {size * 16 / 1e9:,.2f} GB with gradients and AdamW's state\n"
        f"  {rows:,} rows of at most {recipe.data.max_length:,} tokens, {steps:,} optimiser steps of {t.batch_tokens:,} tokens\n"
        f"  memory beside the target: {(size * 16 + logits + features) / 1e9:,.2f} GB with every slot supervised\n"
        f"  each checkpoint {size * 12 / 1e9:,.2f} GB on disk, {t.keep} kept besides the best\n"
        f"run folder: {run_folder(recipe).resolve()}"
    )


def parameters(config: dict[str, Any], draft_vocab: int, taps: int) -> int:
    """Trained parameters of an Eagle3 for a target with this config."""
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    kv = int(config.get("num_key_value_heads") or heads)
    head = int(config.get("head_dim") or hidden // heads)
    attention = 2 * hidden * (heads + 2 * kv) * head + heads * head * hidden
    vocab = draft_vocab or int(config["vocab_size"])
    return hidden * (taps * hidden + 3 * int(config["intermediate_size"]) + vocab + 4) + attention


def identify(recipe: Recipe, source: Source, prepared: Prepared) -> dict[str, str]:
    hashes = {"data.hash": str(prepared.report["hash"]), "vocabulary.hash": prepared.vocab.hash()}
    return run_identity(recipe, **{"target.fingerprint": source.fingerprint, "target.template": source.template_hash}, **hashes)


def begin(recipe: Recipe, folder: Path, source: Source, prepared: Prepared) -> None:
    """The run folder's papers."""
    save(recipe, folder / "recipe.yaml")
    write_json(folder / "provenance.json", provenance(recipe, source, prepared))
    link = folder / "data"
    if not link.is_symlink() and not link.exists():
        try:
            link.symlink_to(prepared.folder.resolve(), target_is_directory=True)
        except OSError:  # a file system without links
            write_text(folder / "data.txt", f"{prepared.folder.resolve()}\n")


def provenance(recipe: Recipe, source: Source, prepared: Prepared) -> dict[str, Any]:
    return {
        "target": {"path": recipe.target.path, "fingerprint": source.fingerprint, "template": source.template_hash},
        "template_args": recipe.target.template_args,
        "data": {"hash": prepared.report["hash"], "folder": str(prepared.folder.resolve())},
        "vocabulary": prepared.report["vocabulary"],
        "seed": recipe.seed,
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in VERSIONS}},
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def finish(
    recipe: Recipe, folder: Path, source: Source, prepared: Prepared, target: Target, drafter: Eagle3, state: State, last: dict[str, Any]
) -> None:
    """Export the best checkpoint, report on prompts that neither training nor the choice has seen, and say where all is."""
    store = Store(folder)
    step = store.named("best")
    assert step is not None, "the end of training always names a best checkpoint"
    drafter.load_state_dict(store.model(step))
    drafter.eval()
    papers = provenance(recipe, source, prepared) | {"step": step, "validation_tau": state.scores.get(step)}
    save_drafter(drafter, folder / "drafter", papers)
    results: list[dict[str, Any]] = []
    if recipe.eval.decoders:
        prompts = load_prompts(recipe.eval.prompts, recipe.eval.limit)
        fp32 = loader(recipe, target)
        results = harness.evaluate(
            recipe,
            target,
            drafter,
            prompts,
            folder / "eval" / f"step-{step}",
            drafter_name=str(folder / "drafter"),
            load_fp32=lambda: fp32(torch.float32),
        )
    summary = {
        "identity": state.identity, "steps": state.cursor.step, "best_step": step,
        "scores": {str(k): v for k, v in state.scores.items()}, "last": last, "decoders": [_headline(r) for r in results],
    }  # fmt: skip
    write_json(folder / "summary.json", summary)
    show(folder, summary)


def _headline(result: dict[str, Any]) -> dict[str, Any]:
    overall = result["overall"]
    return {"decoder": result["decoder"]} | {k: overall.get(k) for k in ("tau", "tokens_per_s", "speedup")}


def show(folder: Path, summary: dict[str, Any]) -> None:
    """The last screen of a run."""
    table = Table("what", "value", title=f"EAGLE-3 drafter in {folder}")
    table.add_row("optimiser steps", str(summary["steps"]))
    last = summary["last"]
    if "loss" in last:
        table.add_row("loss at the end", f"{last['loss']:.4f}")
        table.add_row("accuracy by draft position", " ".join(f"{a:.2f}" for a in last["acc"]))
        table.add_row("simulated tau (training rows)", f"{last['simulated_tau']:.3f}")
    for step, tau in summary["scores"].items():
        best = " (best)" if int(step) == summary["best_step"] else ""
        table.add_row(f"validation tau, step {step}", f"{tau:.3f}{best}")
    for row in summary["decoders"]:
        speed = f", {row['speedup']:.2f} x plain decoding" if row["speedup"] else ""
        table.add_row(f"{row['decoder']}", f"tau {row['tau']:.3f}{speed}" if row["tau"] else "")
    best = folder.resolve() / "eval" / f"step-{summary['best_step']}"
    table.add_row("drafter", str(folder.resolve() / "drafter"))
    table.add_row("report", str(best / "report.md") if summary["decoders"] else "not asked for (eval.decoders is empty)")
    table.add_row("metrics", str(folder.resolve() / "metrics.jsonl"))
    Console().print(table)


def finished(recipe: Recipe, folder: Path, source: Source) -> bool:
    """Whether the run folder holds this very run, complete; if so say so. Another run's folder is refused."""
    path = folder / "summary.json"
    if not path.is_file():
        return False
    summary = json.loads(path.read_text(encoding="utf-8"))
    identity = run_identity(recipe, **{"target.fingerprint": source.fingerprint, "target.template": source.template_hash})
    refuse_change(summary["identity"], identity, folder, only=identity)
    if rank() == 0:
        print(f"this run is finished: {summary['steps']} steps. For another, give run_dir=DIR or remove {folder}", flush=True)
        show(folder, summary)
    return True


def one_screen(run: Callable[[Recipe], None]) -> Callable[[Recipe], None]:
    """Of the ranks that meet the same mistake only the first prints it: the others wait until the launcher ends them."""

    def guarded(recipe: Recipe) -> None:
        try:
            run(recipe)
        except UserError as error:
            if rank() == 0:
                raise
            time.sleep(10)
            raise UserError(f"[process {rank()}] {error}") from error

    return guarded


if __name__ == "__main__":
    entry(one_screen(main))
