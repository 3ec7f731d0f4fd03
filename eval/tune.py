"""Choose decoder, draft length and tree size for this machine, by measurement.

On a CPU a verified row costs real time and on a GPU a drafter step does, so the best setting depends on both the head
and the machine. Every candidate decodes the same validation prompts, interleaved prompt by prompt, so that all of them
see the same text and the same weather. A candidate's speed is predicted as

    tokens a round (sums over the prompts; greedy rounds are deterministic)  /  median cost of a round

which is steadier than tokens over seconds; verification's part of the cost is pooled over the candidates that verify
equally many rows. The field shrinks as prompts are added: all candidates, then the best few,
then a run-off of three. `ar` runs everywhere, and wins when nothing surely beats it: what is gained on a few prompts
by luck would be lost in service.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from data_prep.prompts import Prompt
from eval import contexts, tunings
from eval.decode import Decoded, decode_keeping, ready
from eval.drafters import Drafter, fitted
from eval.filling import Filling
from eval.matrix import SuccessorMatrix
from eval.memory import by_halving, too_many, unpaused
from eval.outcome import check_prompts, encode, in_dtype, longest_prompt, new_matrix, row_id, warmup_prompts
from eval.plan import (
    asked,
    at_batch,
    batch_sizes,
    check_settings,
    own_gates,
    policies,
    refuse_unread,
    settings_of,
)
from eval.results import environment
from eval.settings import BLOCKED, GATED, PARALLEL, Settings
from eval.trials import (
    FIRST_TOKENS,
    Batch,
    Trial,
    best_by_decoder,
    choose,
    cost_curve,
    decoded_by,
    rotated,
    shrink,
    trials_of,
)
from models.flexdraft import FlexDraft
from models.source import load_tokenizer
from models.target import Target
from recipes.cli import entry
from recipes.files import check_writable
from recipes.schema import EvalConfig, Recipe, UserError

WARM_PROMPTS = 3
# (batches of prompts, tokens each, batches even when the budget is spent): everybody, the best few, the run-off
ROUNDS = ((3, 16, 2), (4, 32, 2), (8, 40, 5))
LEAST = sum(least for *_, least in ROUNDS)  # batches
FEW, FINALISTS = 8, 4
GRID_BATCHES, GRID_TOKENS = 8, 32  # of prompts, and tokens each, on which all are measured when the choice is judged
BUDGET_SECONDS = 90.0
SCREENING = 0.5  # share of the budget for the first round
HOPELESS = (0.6, 0.75)  # share of the best speed below which a setting drops out after one prompt, and after more
CHAINS_CPU, CHAINS_GPU = (1, 2, 3, 5), (1, 2, 3, 4, 5, 7)
TREES_CPU = ((2, 1), (3, 1), (3, 2), (4, 2), (7, 3), (9, 4))  # (nodes, depth)
WIDE = ((3, 2), (5, 2), (8, 3), (16, 4), (32, 6), (60, 10))  # (nodes, branch) of talon and recycle
BLOCKS_GPU = (1, 2, 3, 5, 7, 11, 15)  # drafts of a block
THRESHOLDS = (0.01, 0.1, 0.3)  # of a drafter of lines
COPIES = (3, 6, 10, 40)  # lengths of lookup and suffix
HIGHER_GATES = 3  # graft is also tried with gates this much higher: stop sooner, retrieve more
TREES_GPU = tuple(
    (nodes, depth) for nodes in (8, 16, 24, 32, 48, 60) for depth in (2, 3, 4, 6, 8) if 2 * depth <= nodes
)


def tune(
    recipe: Recipe,
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    *,
    decode: Callable[..., Decoded] | None = None,
    budget: float = BUDGET_SECONDS,
    settings: Sequence[Settings] | None = None,
    calibrated: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Measure, choose, and return the entry of tuned.json for the recipe's batch size and temperature.

    The first prompts warm graft's matrix, the others are decoded; none of them may be among the measured ones. Without
    `settings` the `candidates` are measured, by the gates of `calibrated` where there are any.
    """
    drafter, start = in_dtype(drafter, target.dtype), time.perf_counter()
    warm, batches = _prompts(recipe, target, prompts)
    decode = decode or _keeping(warm, batches)
    base = warm_matrix(target, drafter, recipe, warm, decode)
    trials = trials_of(settings or candidates(recipe, target.device.type, drafter, calibrated), base)
    prompts_used = min(len(batches), sum(count for count, *_ in ROUNDS))
    print(f"tuning: {len(trials)} settings on {prompts_used} validation prompts or batches, about {budget:.0f} s")
    run = _runner(target, drafter, decode, base)
    trials = decoded_by(trials, run, batches[0], FIRST_TOKENS, book=False)
    with unpaused():
        finalists = race(trials, batches, run, lambda: (time.perf_counter() - start) / max(budget, 1e-9))
    best, trials = choose(finalists), [trial for trial in trials if trial.fits]
    tuned = {
        "measured_on": environment(target),
        "target": target.fingerprint,
        "batch_size": recipe.eval.batch_size,
        "temperature": recipe.eval.temperature,
        "asked": asked(recipe),
        "seconds": time.perf_counter() - start,
        "chosen": best.record(),
        "speculate": best.settings.decoder != "ar",
        "best": best_by_decoder(trials),
        "table": [trial.record() for trial in sorted(trials, key=lambda t: (-len(t.seconds), -t.speed))],
        "cost_curve": cost_curve(trials),
    }
    print(f"tuned in {tuned['seconds']:.0f} s for batch {tuned['batch_size']}: {tunings.choice(tuned)}")
    return tuned


def tuning(
    recipe: Recipe,
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    folder: Path | None,
    decode: Callable[..., Decoded] | None = None,
    calibrated: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What `eval.tune` left beside the drafter in `folder`, where it was measured on a machine like this; else `tune`,
    whose findings are not kept there."""
    found = tunings.read(folder, recipe, target) if folder is not None else None
    return found or tune(recipe, target, drafter, prompts, decode=decode, calibrated=calibrated)


def race(
    trials: list[Trial], batches: list[Batch], run: Callable[..., Decoded], spent: Callable[[], float]
) -> list[Trial]:
    """Give every trial still in the race the same next prompts; returns the finalists. `spent`: share of the budget."""
    left, used = trials, 0
    for number, (count, tokens, least) in enumerate(ROUNDS):
        for done, batch in enumerate(batches[used : used + count]):
            if done >= least and spent() > (SCREENING if number == 0 else 1):
                break
            left = decoded_by(rotated(left, used), run, batch, tokens)
            used += 1
            if number == 0:
                bar = HOPELESS[min(done, 1)] * max(trial.speed for trial in left)
                left = [trial for trial in left if trial.speed > bar or trial.settings.decoder == "ar"]
        left = shrink(left, FEW if number == 0 else FINALISTS)
    return left


def measured_grid(
    recipe: Recipe,
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    *,
    settings: Sequence[Settings],
    tokens: int = GRID_TOKENS,
    decode: Callable[..., Decoded] | None = None,
) -> list[dict[str, Any]]:
    """Every setting on the same prompts, interleaved: what the tuner's choice is judged against. Fastest first."""
    drafter, (warm, batches) = in_dtype(drafter, target.dtype), _prompts(recipe, target, prompts)
    decode = decode or _keeping(warm, batches)
    base = warm_matrix(target, drafter, recipe, warm, decode)
    trials = trials_of(settings, base)
    run = _runner(target, drafter, decode, base)
    trials = decoded_by(trials, run, batches[0], FIRST_TOKENS, book=False)
    with unpaused():
        for number, batch in enumerate(batches[:GRID_BATCHES]):
            trials = decoded_by(rotated(trials, number), run, batch, tokens)
    return [trial.record() for trial in sorted(trials, key=lambda trial: -trial.speed)]


def judged(
    recipe: Recipe,
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    settings: Sequence[Settings],
    budget: float = BUDGET_SECONDS,
) -> tunings.Tuning:
    """What `tune` finds, with the measured grid beside its choice and how far below the best of it that is."""
    decode = _keeping(*_prompts(recipe, target, prompts))
    tuned = tune(recipe, target, drafter, prompts, decode=decode, settings=settings, budget=budget)
    seconds = grid_seconds(recipe.eval, tuned)
    print(f"the grid: all {len(tuned['table'])} settings measured alike, about {seconds:.0f} s")
    grid = measured_grid(recipe, target, drafter, prompts, decode=decode, settings=settings)
    try:
        return tuned | {"grid": grid, "shortfall": shortfall(grid, tuned["chosen"])}
    except ValueError as error:  # memory did not hold the choice twice
        raise too_many(recipe.eval.batch_size) from error


def grid_seconds(e: EvalConfig, tuned: dict[str, Any]) -> float:
    """What `measured_grid` will take to decode, by the speeds that `tune` saw."""
    tokens = GRID_BATCHES * e.batch_size * min(GRID_TOKENS, e.max_new_tokens)
    return sum(tokens / row["tokens_per_s"] for row in tuned["table"] if row["tokens_per_s"])


def shortfall(grid: list[dict[str, Any]], chosen: dict[str, Any]) -> float:
    """How far the chosen setting is below the best of a measured grid, as a share of the best."""
    return 1 - tunings.of_grid(grid, chosen)["tokens_per_s"] / max(row["tokens_per_s"] for row in grid)


def candidates(
    recipe: Recipe, device: str, drafter: Drafter | None = None, calibrated: dict[str, Any] | None = None
) -> list[Settings]:
    """`ar`, lines of a few lengths, and one set of tree budgets for eagle, prune and graft, within the recipe's; with
    the recipe's gates, or each with its own that were `calibrated`, and with higher ones."""
    e = recipe.eval
    names = [recipe.decoder] if recipe.decoder else list(dict.fromkeys(e.decoders))
    gpu = device == "cuda"
    lines: list[Settings] = []
    if isinstance(drafter, FlexDraft):
        lines = block_candidates(e, names, drafter.config.block_size - 1, gpu)
        names = [name for name in names if name not in BLOCKED]
    shapes = [(n, d) for n, d in (TREES_GPU if gpu else TREES_CPU) if n <= e.nodes and d <= e.depth] or [
        (e.nodes, e.depth)
    ]
    found = [settings_of("ar", e)]
    lengths = {"chain": CHAINS_GPU if gpu else CHAINS_CPU, "lookup": COPIES[:3], "suffix": COPIES}
    for name in names:
        ways: list[dict[str, Any]] = policies(e) if name == "chain" else [{}]
        found += [settings_of(name, e, depth=k, nodes=k, **way) for way in ways for k in lengths.get(name, ())]
        if name in ("eagle", *GATED):
            gates = own_gates(name, calibrated)
            found += [settings_of(name, e, nodes=n, depth=d, branch=min(e.branch, n), **gates) for n, d in shapes]
        if name in ("talon", "recycle"):
            small = [(n, k) for n, k in WIDE if n <= e.nodes]
            found += [settings_of(name, e, nodes=n, branch=min(e.branch, k)) for n, k in small]
    roomy = [s for s in found if s.decoder in GATED and s.depth > 1 and s.nodes > 3 and any(s.gates)]
    found += [replace(s, gates=tuple(min(0.9, HIGHER_GATES * g) for g in s.gates)) for s in roomy]
    return found + lines


def block_candidates(e: EvalConfig, names: Sequence[str], most: int, gpu: bool) -> list[Settings]:
    """Of a drafter of lines of `most` drafts: lengths, both modes unless the recipe names one, and thresholds. Where
    shapes are fixed, a threshold saves `flex` nothing: the recipe's alone is tried."""
    lengths = sorted({min(k, most) for k in (BLOCKS_GPU if gpu else CHAINS_CPU)})
    modes = (False, True) if e.flex_mode == "auto" else (e.flex_mode == "parallel",)
    cut = {"flex": (e.flex_threshold,) if gpu else tuple(sorted({e.flex_threshold, *THRESHOLDS}))}
    cut |= dict.fromkeys(GATED, (e.gates[0],) if e.gates else THRESHOLDS)
    found = []
    for name in (name for name in BLOCKED if name in names):
        for k, parallel in itertools.product(lengths, modes if name in PARALLEL else (False,)):
            whole = settings_of(name, e, depth=k, nodes=k, branch=1, parallel=parallel)
            bars = cut.get(name, ())[: 1 if name == "flex" and k == 1 else None]  # its one draft is always kept
            found += [replace(whole, gates=(bar,)) for bar in bars] or [whole]
    return found


def warm_matrix(
    target: Target, drafter: Drafter, recipe: Recipe, warm: list[list[int]], decode: Callable[..., Decoded]
) -> SuccessorMatrix:
    """The matrix that every graft candidate starts from: a few prompts decoded with a small tree."""
    matrix = new_matrix(target)
    if warm:
        e = recipe.eval
        settings = settings_of(
            "graft", e, nodes=min(6, e.nodes), depth=min(2, e.depth), max_new_tokens=min(32, e.max_new_tokens)
        )

        def run(slots: int) -> Decoded:
            return decode(target, drafter, warm, settings, matrix=matrix, row_ids=[*range(len(warm))], slots=slots)

        by_halving(len(warm), run)
        matrix.filling = Filling()  # other settings win other tokens
    return matrix


def _runner(
    target: Target, drafter: Drafter, decode: Callable[..., Decoded], base: SuccessorMatrix
) -> Callable[..., Decoded]:
    """Runs a trial on a batch; prompts that come again find the matrix as it was before any of them."""

    def run(trial: Trial, batch: list[list[int]], row_ids: list[int], again: bool) -> Decoded:
        if again and trial.matrix is not None:
            filling = trial.matrix.filling
            trial.matrix.assign(base)
            trial.matrix.filling = filling  # it holds nothing of their text
        helper = drafter if trial.settings.drafts else None
        once = partial(decode, target, helper, batch, trial.settings, matrix=trial.matrix, row_ids=row_ids)
        return ready(once, trial.matrix)

    return run


def _keeping(warm: list[list[int]], batches: list[Batch]) -> Callable[..., Decoded]:
    """`decode` with engines of its own, whose caches no prompt outgrows."""
    return decode_keeping(max(len(ids) for group in (warm, *(ids for ids, *_ in batches)) for ids in group))


def _prompts(recipe: Recipe, target: Target, prompts: Sequence[Prompt]) -> tuple[list[list[int]], list[Batch]]:
    """(prompts that warm the matrix, batches to decode); prompts come again where there are too few for `LEAST`."""
    limit = longest_prompt(target, recipe.eval)
    named = [(p.id, encode(target, recipe, p)) for p in prompts]
    named = [(name, ids) for name, ids in named if len(ids) <= limit]
    if not named:
        raise UserError(
            "tuning needs validation prompts that fit the model and are not measured themselves. Or: eval.tune=false"
        )
    warming = min(WARM_PROMPTS, len(named) // 3)
    warm, rest = [ids for _, ids in named[:warming]], named[warming:]
    size, batches = recipe.eval.batch_size, []
    for start in range(0, size * max(len(rest) // size, LEAST), size):
        part = [rest[k % len(rest)] for k in range(start, start + size)]
        again = start + size > len(rest)
        batches.append(([ids for _, ids in part], [row_id(name, 0) for name, _ in part], again))
    return warm, batches


def main(recipe: Recipe) -> None:
    """`python -m eval.tune recipe=NAME drafter=DIR`: tune at each batch size, judge the choice on a grid, and look what
    longer contexts cost."""
    from eval.run import calibrated_gates, check_models, drafter_folder, load, with_calibrated_gates

    refuse_unread(recipe, "eval.tune", "prompts", "out")
    if recipe.decoder == "ar" or (not recipe.decoder and set(recipe.eval.decoders) <= {"ar"}):
        which = "decoder=ar" if recipe.decoder else f"eval.decoders=[{','.join(recipe.eval.decoders)}]"
        raise UserError(f"{which}: plain decoding has nothing to tune. Name another, or leave it out")
    if recipe.eval.max_new_tokens < 2:
        raise UserError("eval.max_new_tokens=1: that token is prefill's, and no round is left to time. Give 2 or more")
    check_settings(recipe)
    source, prompts = check_models(recipe), warmup_prompts()
    folder = check_writable(drafter_folder(recipe))  # tuned.json belongs beside the drafter
    tunings.check(folder)
    if source is not None:
        check_prompts(source, load_tokenizer(source, recipe.target.trust_remote_code), recipe, prompts)
    if recipe.dry_run:
        print(OmegaConf.to_yaml(OmegaConf.structured(recipe)))
    sizes = ", ".join(map(str, batch_sizes(recipe.eval)))
    grid = f"the grid several times that, and rounds behind at most {recipe.eval.max_prompt:,} tokens a while longer"
    print(f"tuning takes about {BUDGET_SECONDS:.0f} s, {grid}, at each batch size: {sizes}")
    gates = calibrated_gates(recipe)
    recipe = with_calibrated_gates(recipe, gates)
    if recipe.dry_run:
        return
    target, drafter, _ = load(recipe)
    recipe, found = fitted(recipe, drafter), []
    for size in batch_sizes(recipe.eval):
        sized = at_batch(recipe, size)
        settings = candidates(sized, target.device.type, drafter, gates)
        tuned = judged(sized, target, drafter, prompts, settings)
        tunings.write(folder, tuned)  # should what follows be ended
        print("\n".join(tunings.grid_lines(tuned)), flush=True)
        found.append(tuned | {"contexts": contexts.by_context(sized, target, drafter, prompts, tuned)})
        tunings.write(folder, found[-1])
        print("\n".join(tunings.context_lines(found[-1])), flush=True)
    if isinstance(drafter, FlexDraft):
        print("\n".join(tunings.crossover(found)))
    print(f"written to {folder / tunings.FILE}")


if __name__ == "__main__":
    entry(main)
