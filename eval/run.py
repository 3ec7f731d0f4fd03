"""`python -m eval.run recipe=NAME drafter=DIR [decoder=graft] [prompts=FILE.jsonl] [out=DIR]`: what is it worth here?

Everything that can be refused is refused before weights load; results appear whole or not at all.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from data_prep.prompts import Prompt, load_prompts
from eval import calibrated, harness, sweep, tune, tunings
from eval.drafters import Drafter, fitted, served
from eval.outcome import check_prompts, disjoint, longest_prompt, too_long, warmup_prompts
from eval.plan import Entry, batch_sizes, check_settings, describe, plan
from models.device import choose_device, choose_dtype
from models.flex_layout import check_flexdraft, is_flexdraft, load_flexdraft, read_config
from models.layouts import check_drafter, find_drafter, load_drafter
from models.source import Source, load_tokenizer, look_up, on_the_hub, resolve
from models.target import Target, check_taps, load_target
from recipes.cli import entry
from recipes.files import check_writable, output_folder, run_folder, user_path
from recipes.schema import DRAFTED, Recipe, TargetConfig, UserError

# what generation configs may ask for and a tree of drafts cannot honour losslessly without knowing the path's history
NOT_APPLIED = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0, "min_p": None}


def main(recipe: Recipe) -> None:
    prompts = check(recipe)
    gates = calibrated_gates(recipe)
    entries = plan(as_served(recipe), drafter=needs_drafter(recipe), calibrated=gates)
    if recipe.dry_run:
        print(OmegaConf.to_yaml(OmegaConf.structured(recipe)))
        print(cost(recipe, prompts, entries))
        return
    with output_folder(out_folder(recipe)) as out:
        evaluate(recipe, prompts, gates, out)


def evaluate(recipe: Recipe, prompts: list[Prompt], gates: dict[str, Any] | None, out: Path) -> None:
    if not needs_drafter(recipe):
        target = load_eval_target(recipe)
        sizes = sweep.sweep(recipe, target, None, prompts) if recipe.eval.batch_sizes else []
        harness.evaluate(recipe, target, None, prompts, out, load_fp32=lambda: load_exact(recipe), sizes=sizes)
        return
    target, drafter, folder = load(recipe)
    recipe = fitted(recipe, drafter)
    from_here, tuned = with_calibrated_gates(recipe, gates), None  # the tuner tries these gates
    if recipe.eval.tune:
        spare = disjoint(warmup_prompts(), prompts)
        tuned = tune.tuning(from_here, target, drafter, spare, folder, calibrated=gates)
    elif recipe.eval.tune is None:
        tuned = tunings.read(folder, from_here, target)
    sizes = []
    if recipe.eval.batch_sizes:
        sizes = sweep.sweep(from_here, target, drafter, prompts, folder, tuned, calibrated=gates)
    harness.evaluate(
        recipe,
        target,
        drafter,
        prompts,
        out,
        tuned=tuned,
        calibrated=gates,
        drafter_name=str(folder),
        load_fp32=lambda: load_exact(recipe, target.taps),
        sizes=sizes,
    )


def calibrated_gates(recipe: Recipe) -> dict[str, Any] | None:
    """What lies beside the drafter, where it is asked for and the recipe names no gates of its own."""
    folder = drafter_folder(recipe)
    return calibrated.read(folder) if needs_drafter(recipe) and not recipe.eval.gates and folder.is_dir() else None


def with_gates(recipe: Recipe, gates: Sequence[float]) -> Recipe:
    return replace(recipe, eval=replace(recipe.eval, gates=list(gates)))


def with_calibrated_gates(recipe: Recipe, gates: dict[str, Any] | None) -> Recipe:
    """The recipe as the tuner takes it: graft's gates are the `calibrated_gates`, if there are any."""
    return recipe if gates is None else with_gates(recipe, gates["gates"]["graft"])


def check(recipe: Recipe) -> list[Prompt]:
    """All mistakes that show without weights; returns the prompts to measure."""
    check_settings(recipe)
    check_writable(out_folder(recipe))
    prompts = load_prompts(recipe.prompts or recipe.eval.prompts, recipe.eval.limit)
    source = check_models(recipe, needs_drafter(recipe))
    harness.check_matrix(recipe, source, prompts)
    if recipe.eval.tune is not False and needs_drafter(recipe):
        tunings.check(drafter_folder(recipe))
    if source is not None:
        tokenizer = load_tokenizer(source, recipe.target.trust_remote_code)
        check_prompts(source, tokenizer, recipe, prompts)
        if long := [*compress(prompts, too_long(source, tokenizer, recipe, prompts))]:
            limit, names = longest_prompt(source, recipe.eval), ", ".join(prompt.id for prompt in long[:12])
            print(f"prompts: {len(long)} of {len(prompts)} left out, longer than {limit} tokens ({names})", flush=True)
    return prompts


def check_models(recipe: Recipe, drafter: bool = True) -> Source | None:
    """Refuse a target that cannot be used, and a drafter that is missing or does not belong to it, without weights.

    None where a dry run would have to fetch or convert the target: what hangs on it is not checked.
    """
    choose_dtype(dtype_name(recipe), choose_device(recipe.device))
    folder = drafter_folder(recipe)
    if drafter and recipe.dry_run and not recipe.drafter and not folder.is_dir():
        print(f"no drafter in {folder} yet")
        drafter = False
    if drafter and recipe.dry_run and on_the_hub(recipe.drafter):
        print(f"drafter={recipe.drafter} will be fetched from the hub")
        drafter = False
    if drafter:
        existing_drafter(recipe)
    source = look_up(recipe.target, recipe.dry_run)
    if source is not None:
        check_taps(recipe.target.taps, source.n_layers)
    if drafter:
        (check_flexdraft if is_flexdraft(folder) else check_drafter)(folder, source)
    return source


def as_served(recipe: Recipe) -> Recipe:
    """The recipe as the drafter can serve it, which is looked at and not loaded; as it is where none is there yet."""
    folder = drafter_folder(recipe)
    if not needs_drafter(recipe) or not folder.is_dir():
        return recipe
    return served(recipe, read_config(folder).block_size if is_flexdraft(folder) else 0)


def load(recipe: Recipe) -> tuple[Target, Drafter, Path]:
    """The target in the evaluation's dtype, giving the states that the drafter reads, and the drafter."""
    folder, source = existing_drafter(recipe), resolve(recipe.target)
    if is_flexdraft(folder):
        target = load_eval_target(recipe)
        return target, load_flexdraft(folder, target), folder
    taps = check_drafter(folder, source, quiet=True).config(source.n_layers).taps
    target = load_eval_target(recipe, taps)
    return target, load_drafter(folder, target), folder


def load_eval_target(recipe: Recipe, taps: Sequence[int] = ()) -> Target:
    device = choose_device(recipe.device)
    target = load_target(with_taps(recipe.target, taps), device, choose_dtype(dtype_name(recipe), device))
    warn_not_applied(target.folder)
    return target


def load_exact(recipe: Recipe, taps: Sequence[int] = ()) -> Target:
    return load_target(with_taps(recipe.target, taps), choose_device(recipe.device), torch.float32)


def with_taps(target: TargetConfig, taps: Sequence[int]) -> TargetConfig:
    return replace(target, taps=list(taps) or target.taps)


def dtype_name(recipe: Recipe) -> str:
    return recipe.eval.dtype if recipe.eval.dtype != "auto" else recipe.target.dtype


def needs_drafter(recipe: Recipe) -> bool:
    return any(name in DRAFTED for name in ([recipe.decoder] if recipe.decoder else recipe.eval.decoders))


def drafter_folder(recipe: Recipe) -> Path:
    """Where the drafter is or will be; fetched if `drafter` is a hub id, but in a dry run."""
    if on_the_hub(recipe.drafter) and not recipe.dry_run:
        return find_drafter(recipe.drafter)
    return user_path(recipe.drafter) if recipe.drafter else run_folder(recipe) / "drafter"


def existing_drafter(recipe: Recipe) -> Path:
    folder = drafter_folder(recipe)
    if not folder.is_dir():
        raise UserError(f"drafter={folder}: no such folder. Train one (train/eagle.py) or give drafter=DIR")
    return folder


def out_folder(recipe: Recipe) -> Path:
    return user_path(recipe.out) if recipe.out else run_folder(recipe) / "eval" / "run"


def warn_not_applied(folder: Path) -> None:
    """Say which of the target's own sampling habits are left out: they would change what lossless means."""
    path = folder / "generation_config.json"
    wishes = json.loads(path.read_text()) if path.is_file() else {}
    for key, off in NOT_APPLIED.items():
        if wishes.get(key, off) not in (off, None):
            print(f"note: the target's generation_config asks for {key}={wishes[key]}; no decoder here applies it")


def cost(recipe: Recipe, prompts: list[Prompt], entries: list[Entry]) -> str:
    """What a run would do, before it does it."""
    turns, limit = sum(len(prompt.turns) for prompt in prompts), recipe.eval.max_new_tokens
    most = f"at most {turns * limit} tokens a decoder"
    lines = [f"{len(prompts)} prompts, {turns} turns, max_new_tokens {limit}: {most}"]
    for row in entries:
        lines.append(f"  {row.label}: {describe(row.settings)}{f', matrix {row.matrix}' if row.matrix else ''}")
    if recipe.eval.batch_sizes:
        sizes = ", ".join(map(str, batch_sizes(recipe.eval)))
        lines.append(f"  and first turns at batch {sizes}: every decoder, and ar, at each size")
    if recipe.eval.tune and needs_drafter(recipe):
        seconds = f"about {tune.BUDGET_SECONDS:.0f} s a batch size"
        lines.append(f"  settings are tuned first ({seconds}) unless eval.tune left a tuned.json of this machine")
    elif recipe.eval.tune is None and needs_drafter(recipe) and (drafter_folder(recipe) / tunings.FILE).is_file():
        lines.append("  settings are those of the drafter's tuned.json, if measured on this machine with this recipe")
    lines.append(f"results, report.md and plots go to {out_folder(recipe)}")
    return "\n".join(lines)


if __name__ == "__main__":
    entry(main)
