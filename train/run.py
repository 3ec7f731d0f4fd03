"""What every entry point of training does around its loop, whatever the drafter's family: checks, data, the run folder
and its papers, evaluation after each epoch and at the end, the last screen.

A family is a file with a `Family`, an Objective, and a line that hands the one to `main` (train/flexdraft.py).
"""

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from data_prep import states
from data_prep.probe import expected
from data_prep.prompts import Prompt, load_prompts
from data_prep.run import Prepared, check, load_prepared, prepare
from data_prep.sources import SourceCost
from data_prep.state_store import StateStore
from eval import harness
from eval.drafters import Drafter, served
from models.card import measured, public, publishable, sources, target_licence, write_card
from models.device import choose_dtype, local_device
from models.sharded import led, load_sharded
from models.source import Source, load_tokenizer
from models.target import Target, load_target
from recipes.files import (
    check_writable,
    locked,
    output_folder,
    read_json,
    run_folder,
    whole_folder,
    write_json,
)
from recipes.schema import Recipe, UserError
from train.backend import fill, make_accelerator, shards_target
from train.checkpoint import STEP, TEACHER, State, Store, refuse_change, refuse_other_run, run_identity
from train.features import StoredTeacher
from train.loop import Loop
from train.objective import Objective
from train.papers import begin, data_hashes, hashes, provenance
from train.precision import precision


class Family:
    """What one kind of drafter brings to a training run."""

    title = ""  # as people call it
    part = ""  # the group of the recipe that tells its runs apart
    shards = True  # the target may be cut over the processes
    goes_on = False  # from the masks that `flexdraft` names

    def block(self, recipe: Recipe) -> int:
        """Masks of a group, of a drafter that drafts lines; 0 of one that grows trees."""
        return 0

    def check(self, recipe: Recipe, source: Source | None) -> None:
        """Refuse what can be refused before anything loads; `source` is None in a dry run alone."""

    def hashes(self, recipe: Recipe) -> dict[str, str]:
        """Of what else a run starts from."""
        return {}

    def cost(self, recipe: Recipe, prompts: int) -> str:
        raise NotImplementedError

    def chosen(self, recipe: Recipe, prepared: Prepared) -> Prepared:
        """What of the prepared data is trained on; by itself all."""
        return prepared

    def objective(
        self, recipe: Recipe, target: Target, teacher: Target, prepared: Prepared, bf16: bool
    ) -> tuple[Objective, Prepared]:
        """What is trained, and the data with the vocabulary that it speaks. `teacher` is the
        target in the dtype of the training step."""
        raise NotImplementedError

    def read_from(self, store: StoredTeacher, objective: Objective) -> None:
        """Train from the target's states on disk (`data.states`)."""
        raise NotImplementedError

    def drafter(self, trained: Any) -> Drafter:
        """What decodes, around what was trained: by itself the same."""
        whole: Drafter = trained
        return whole

    def save(self, drafter: Drafter, folder: Path, papers: dict[str, Any]) -> None:
        """Export, with provenance.json made of `papers`."""
        raise NotImplementedError


def main(recipe: Recipe, family: Family) -> None:
    harness.check_settings(recipe)
    decoders = served(recipe, family.block(recipe)).eval.decoders
    if recipe.flexdraft and not family.goes_on:
        raise UserError(
            f"flexdraft={recipe.flexdraft} is for train/calibrator.py, which fits a calibrator to those masks. "
            f"This command trains a new {family.title} drafter, and would not read them: leave flexdraft out"
        )
    if recipe.drafter:
        raise UserError(
            f"drafter={recipe.drafter} is for the commands that decode; this one trains a new drafter and would not "
            "read that one: leave drafter out (eagle.init_from starts from an EAGLE-3 drafter)"
        )
    folder = check_writable(run_folder(recipe))
    prompts = load_prompts(recipe.eval.prompts, recipe.eval.limit)
    costs, source = check(recipe)
    harness.check_matrix(recipe, source, prompts)
    family.check(recipe, source)
    refuse_other_run(folder, run_identity(recipe, family.part, **hashes(source), **family.hashes(recipe)))
    if source is not None:
        harness.check_prompts(source, load_tokenizer(source, recipe.target.trust_remote_code), recipe, prompts)
    if source is None or recipe.dry_run:  # None in a dry run alone
        print(OmegaConf.to_yaml(OmegaConf.structured(recipe)))
        print(SourceCost.table(costs))
        print("\n".join(expected(recipe, SourceCost.load(costs))))
        print(family.cost(recipe, sum(max(0, c.prompts) for c in costs)))
        print(states.expected_size(recipe, source, SourceCost.load(costs)))
        print(f"evaluation: {len(prompts)} prompts by {', '.join(decoders)}\nrun folder: {folder.resolve()}")
        return
    with output_folder(folder), alone(folder):
        if not finished(recipe, family, folder, source):
            train(recipe, family, folder, source, prompts)


def train(recipe: Recipe, family: Family, folder: Path, source: Source, prompts: list[Prompt]) -> None:
    torch.manual_seed(recipe.seed)
    device = local_device(recipe.device)
    dtype = choose_dtype(recipe.target.dtype, device)
    accelerator = make_accelerator(device, recipe.train.clip)
    main = accelerator.is_main_process
    target = load(recipe, accelerator, device, dtype, family.shards)
    prepared = led(target, main, lambda: prepare(recipe, loader(recipe, target), source))
    told: list[Any] = [str(prepared.folder), precision(recipe, device, folder)] if prepared else ["", {}]
    shared_folder, chosen = broadcast_object_list(told)  # what a short timing says must hold for all
    prepared = family.chosen(recipe, prepared or shared(Path(shared_folder)))
    teacher = loader(recipe, target)(choose_dtype(chosen[TEACHER], device))
    objective, prepared = family.objective(recipe, target, teacher, prepared, chosen[STEP] == "bfloat16")
    identity = identify(recipe, family, source, prepared) | chosen
    if main:
        Store(folder, objective.vocab).resume(identity)  # refuses another run before anything of this one is written
        begin(recipe, folder, source, prepared, identity)
    if recipe.data.states != "none":
        layout, ranks = states.layout_of(recipe, source, prepared, teacher.dtype), accelerator.num_processes
        (missing,) = broadcast_object_list([layout.missing()])
        states.write(layout, missing, lambda: teacher, accelerator.process_index, ranks, together=teacher.sharded)
        accelerator.wait_for_everyone()
        store = StateStore(layout)
        if main and store.unchecked:
            print(store.unchecked, flush=True)
        family.read_from(StoredTeacher(teacher, store), objective)
    loop = Loop(recipe, objective, prepared.train, accelerator, folder)

    def score(trained: Any) -> float | None:
        drafter, held_out = family.drafter(trained), prepared.validation_prompts
        return led(target, main, lambda: harness.validation_tau(recipe, target, drafter, held_out))

    wanted = recipe.eval.each_epoch and len(prepared.validation_prompts) > 0
    state = loop.run(identity, score if wanted else None, asdict(recipe))
    trained = loop.whole.to(device)
    best = family.drafter(trained)
    if main:
        load_best(Store(folder), trained)
        export(recipe, family, folder, source, prepared, best, state)
    led(target, main, lambda: report(recipe, family, folder, target, best, state, prompts, loop.packing()))
    accelerator.end_training()


def alone(folder: Path) -> AbstractContextManager[None]:
    """The run folder held by this run, whose first process answers for all of them."""
    return locked(folder, "training in this folder") if rank() == 0 else nullcontext()


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def load(recipe: Recipe, accelerator: Accelerator, device: torch.device, dtype: torch.dtype, shards: bool) -> Target:
    if not (shards and shards_target(recipe, accelerator)):
        return load_target(recipe.target, device, dtype)
    turns = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return load_sharded(recipe.target, device, dtype, accelerator.local_process_index, turns)


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


def identify(recipe: Recipe, family: Family, source: Source, prepared: Prepared) -> dict[str, str]:
    made = data_hashes(prepared) | {"vocabulary.hash": prepared.vocab.hash()}
    return run_identity(recipe, family.part, **hashes(source), **family.hashes(recipe), **made)


def load_best(store: Store, trained: Any) -> None:
    step = store.named("best")
    assert step is not None, "the end of training always names a best checkpoint"
    fill(trained, store.model(step))
    trained.eval()


def export(
    recipe: Recipe, family: Family, folder: Path, source: Source, prepared: Prepared, drafter: Drafter, state: State
) -> None:
    """Write the drafter, which is that of the best checkpoint, in its family's layout, with its model card."""
    step = Store(folder).named("best")
    assert step is not None
    papers = provenance(recipe, source, prepared, state.identity) | {
        "fingerprint": source.fingerprint,
        "step": step,
        "validation_tau": state.scores.get(step),
        "recipe": public(asdict(recipe)),
        "sources": sources(recipe),
    }
    papers["target"]["licence"] = target_licence(recipe.target, source.folder)
    with whole_folder(folder / "drafter") as aside:
        family.save(drafter, aside, publishable(papers))
        write_card(aside)


def report(
    recipe: Recipe,
    family: Family,
    folder: Path,
    target: Target,
    drafter: Drafter,
    state: State,
    prompts: list[Prompt],
    packing: dict[str, float],
) -> None:
    """Measure the exported drafter on prompts that neither training nor the choice has seen, and say where all is."""
    step = Store(folder).named("best")
    if target.sharded and recipe.eval.lossless >= 0:
        print(
            "the target is sharded, so its outputs are not compared with transformers'; eval.run does that", flush=True
        )
        recipe = replace(recipe, eval=replace(recipe.eval, lossless=-1))
    copies = loader(recipe, target)
    wanted = recipe.eval.dtype if recipe.eval.dtype != "auto" else recipe.target.dtype
    results = harness.evaluate(
        recipe,
        copies(choose_dtype(wanted, target.device)),
        drafter,
        prompts,
        folder / "eval" / f"step-{step}",
        drafter_name=str(folder / "drafter"),
        load_fp32=lambda: copies(torch.float32),
    )
    write_card(folder / "drafter", {"measured": [measured(result, recipe.eval.prompts) for result in results]})
    summary = {
        "identity": state.identity,
        "steps": state.cursor.step,
        "best_step": step,
        "scores": {str(k): v for k, v in state.scores.items()},
        "packing": packing,
        "last": newest(folder / "metrics.jsonl"),
        "decoders": [headline(r) for r in results],
    }
    write_json(folder / "summary.json", summary)
    show(folder, summary, family.title)


def newest(metrics: Path) -> dict[str, Any]:
    """The last training figures that were logged, by whichever process trained last."""
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return next((line for line in reversed(lines) if "loss" in line), {})


def headline(result: dict[str, Any]) -> dict[str, Any]:
    overall = result["overall"]
    return {"decoder": result["decoder"]} | {k: overall.get(k) for k in ("tau", "tokens_per_s", "speedup")}


def show(folder: Path, summary: dict[str, Any], family: str) -> None:
    """The last screen of a run."""
    table = Table("what", "value", title=f"{family} drafter in {folder}")
    table.add_row("optimiser steps", str(summary["steps"]))
    last = summary["last"]
    if "loss" in last:
        table.add_row("loss at the end", f"{last['loss']:.4f}")
        table.add_row("accuracy by draft position", " ".join(f"{a:.2f}" for a in last["acc"]))
        table.add_row("simulated tau (training rows)", f"{last['simulated_tau']:.3f}")
    if "packing" in summary:
        used = summary["packing"]
        table.add_row("micro-batches", f"{used['filled']:.1%} full, padding {used['padding']:.2%}")
    for step, tau in summary["scores"].items():
        mark = " (best)" if int(step) == summary["best_step"] else ""
        table.add_row(f"validation tau, step {step}", f"{tau:.3f}{mark}")
    for row in summary["decoders"]:
        speed = f", {row['speedup']:.2f} x plain decoding" if row["speedup"] else ""
        table.add_row(f"{row['decoder']}", f"tau {row['tau']:.3f}{speed}" if row["tau"] else "")
    best = folder.resolve() / "eval" / f"step-{summary['best_step']}"
    table.add_row("drafter", str(folder.resolve() / "drafter"))
    table.add_row("report", str(best / "report.md"))
    table.add_row("metrics", str(folder.resolve() / "metrics.jsonl"))
    Console().print(table)


def finished(recipe: Recipe, family: Family, folder: Path, source: Source) -> bool:
    """Whether the run in the folder is complete; if so say so. UserError where its data have become others."""
    path = folder / "summary.json"
    if not path.is_file():
        return False
    summary = read_json(path, "run folder (delete the file to redo the evaluation)")
    if rank() == 0:
        prepared, seen = states.prepared_already(recipe, source), "none are prepared for the sources as they are now"
        if prepared is not None:
            now, seen = data_hashes(family.chosen(recipe, prepared)), "they are the same"
            refuse_change({k: v for k, v in summary["identity"].items() if k in now}, now, folder)
        print(
            f"this run is finished: {summary['steps']} steps (its data: {seen}). "
            f"For another, give run_dir=DIR or remove {folder}",
            flush=True,
        )
        show(folder, summary, family.title)
    return True


def one_screen(run: Callable[[Recipe], None]) -> Callable[[Recipe], None]:
    """Of ranks that meet the same mistake the first alone prints it: the others wait until the launcher ends them."""

    def guarded(recipe: Recipe) -> None:
        try:
            run(recipe)
        except UserError as error:
            if rank() == 0:
                raise
            time.sleep(10)
            raise UserError(f"[process {rank()}] {error}") from error
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            leave()

    return guarded


def leave() -> None:
    """End a process of several whose work is done, at once. Ending in order, one of a finished ZeRO-3 run was seen to
    abort ("terminate called without an active exception": a thread that torch or DeepSpeed keep in C++)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
