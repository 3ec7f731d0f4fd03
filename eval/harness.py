"""The harness: every decoder on the same prompts, interleaved in one process, always beside plain decoding (`ar`).

Order rotates from batch to batch so that no decoder always runs on a warm or a throttled machine. Turn 2 of a
conversation follows the answer that `ar` gave to turn 1, so that all decoders see the same prompts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from data_prep.loops import is_loop
from data_prep.prompts import Prompt
from eval import flex_report, lossless, picture, report, results, tune
from eval.decode import Decoded, decode_keeping, ready
from eval.drafters import Drafter, fitted
from eval.matrix import SuccessorMatrix
from eval.matrix_file import is_file, read_matrix, starting_matrix
from eval.memory import SMALLER, NoRoom, attempt, by_halving, unpaused
from eval.outcome import (
    Outcome,
    check_prompts,
    disjoint,
    encode,
    flag_loops,
    in_dtype,
    longest_prompt,
    new_matrix,
    row_id,
    warmup_prompts,
)
from eval.plan import Entry, check_settings, describe, plan, settings_of, warm_prompts
from eval.settings import Settings
from models.source import Source
from models.target import Target
from recipes.files import user_path
from recipes.schema import Recipe, UserError

Decode = Callable[..., Decoded]
UNTIMED_BATCH = {"cpu": 16, "cuda": 64}  # rows of a batch where only tau is wanted
FIRST_TOKENS = {"cpu": 16, "cuda": 96}  # of the untimed first run of each decoder, in which a GPU's steps are captured


@dataclass
class Bench:
    """What stays fixed while the prompts go by, and what they leave behind."""

    recipe: Recipe
    target: Target
    drafter: Drafter | None
    entries: list[Entry]
    decode: Decode
    matrices: dict[str, SuccessorMatrix] = field(default_factory=dict)
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    size: int = 0  # rows of a timed batch; the recipe's, or the largest that memory holds
    no_room: list[int] = field(default_factory=list)  # sizes that memory did not hold

    def __post_init__(self) -> None:
        self.size = self.size or self.recipe.eval.batch_size

    def shrink(self, size: int) -> None:
        """Half of `size`, which memory does not hold."""
        self.no_room.append(size)
        self.size = (size + 1) // 2
        print(f"out of memory at batch {size}: trying {self.size}", flush=True)

    @property
    def limit(self) -> int:
        return longest_prompt(self.target, self.recipe.eval)

    def run(
        self,
        settings: Settings,
        prompts: list[list[int]],
        row_ids: list[int],
        matrix: SuccessorMatrix | None,
        slots: int = 0,
    ) -> Decoded:
        drafter = self.drafter if settings.drafts else None
        return self.decode(self.target, drafter, prompts, settings, matrix=matrix, row_ids=row_ids, slots=slots)

    def matrix_of(self, entry: Entry) -> SuccessorMatrix | None:
        """The matrix in the state that the entry asks for: what earlier prompts have left, or a fresh one, which keeps
        of them whether retrieval paid."""
        if entry.matrix == "cold":
            before, fresh = self.matrices.get(entry.label), new_matrix(self.target)
            fresh.filling = fresh.filling if before is None else before.filling
            self.matrices[entry.label] = fresh
        return self.matrices.get(entry.label)


def evaluate(
    recipe: Recipe,
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Prompt],
    out: Path | None = None,
    *,
    warmup: Sequence[Prompt] | None = None,
    tuned: dict[str, Any] | None = None,
    calibrated: dict[str, Any] | None = None,
    drafter_name: str = "",
    load_fp32: Callable[[], Target] | None = None,
    decode: Decode | None = None,
    sizes: Sequence[dict[str, Any]] = (),
) -> list[dict[str, Any]]:
    """Run every decoder of the recipe on `prompts`; returns one results.json dict a decoder, `ar` first.

    `warmup` prompts (default: some that ship with Espalier) warm the matrix and serve the tuner; those that are also
    measured are left out. `tuned` is what `tune.tune` found; with eval.tune and none given, tuning comes first.
    `calibrated` is what `eval.calibrated` read. With `out`, the results, report.md, plots and tuned.json are written
    there. `load_fp32` gives the target in float32, for the lossless check of a run in another dtype. `sizes` (of
    eval.sweep) and the picture of one round's tree, where decoding is our own, go into the report.
    """
    recipe = fitted(recipe, drafter)
    check_settings(recipe)
    draws = decode is None
    decode = decode or decode_keeping(longest_conversation(recipe, target, prompts))
    drafter = in_dtype(drafter, target.dtype) if drafter is not None else None
    if not prompts:
        raise UserError("no prompts to evaluate. Give prompts=FILE.jsonl with at least one line")
    check_prompts(target, target.tokenizer, recipe, prompts)
    spare = disjoint(warmup if warmup is not None else warmup_prompts(), prompts)
    with lossless.exact_matmul(target):
        if recipe.eval.tune and tuned is None and drafter is not None:
            tuned = tune.tune(recipe, target, drafter, spare, decode=decode)
        bench = Bench(recipe, target, drafter, plan(recipe, tuned, drafter is not None, calibrated), decode)
        announce(bench, len(prompts))
        warm_up(bench, spare)
        measure(bench, prompts)
        flag_loops(bench.outcomes)
        checks = lossless.check(bench, load_fp32)
        calibration = calibrator_worth(bench)
    tables = results.build(bench, checks, tuned, drafter_name)
    if out is not None:
        tree = attempt(partial(picture.sketch, bench)) if draws else None
        report.write(tables, tuned, out, sizes, tree, calibration)
    report.summary(tables, out)
    return tables


def calibrator_worth(bench: Bench) -> dict[str, Any] | None:
    """What memory does not hold is left out: what was measured before is worth its report."""
    try:
        return flex_report.calibration(bench, UNTIMED_BATCH[bench.target.device.type])
    except NoRoom:
        print("out of memory: what the calibrator brings was not measured", flush=True)
        return None


def check_matrix(recipe: Recipe, source: Source | None, prompts: Sequence[Prompt]) -> None:
    """Refuse a start of the matrix that the evaluation could not have; needs no weights."""
    wanted, spare = warm_prompts(recipe.eval.matrix), disjoint(warmup_prompts(), prompts)
    if wanted > len(spare):
        words = f"only {len(spare)} warm-up prompts are at hand. Use warm-{len(spare)} or carried"
        raise UserError(f"eval.matrix=warm-{wanted}: {words}")
    if is_file(recipe.eval.matrix):
        about = ("", 0) if source is None else (source.fingerprint, source.vocab_size)
        read_matrix(user_path(recipe.eval.matrix), *about)


def longest_conversation(recipe: Recipe, target: Target, prompts: Sequence[Prompt]) -> int:
    """Tokens of the longest last prompt, at most: every turn's question and a full answer to all but the last."""
    answers = recipe.eval.max_new_tokens
    lengths = [
        len(encode(target, recipe, p, [""] * (len(p.turns) - 1))) + answers * (len(p.turns) - 1) for p in prompts
    ]
    return min(longest_prompt(target, recipe.eval), max(lengths))


def validation_tau(
    recipe: Recipe, target: Target, drafter: Drafter, prompts: Sequence[Prompt], *, decode: Decode | None = None
) -> float:
    """Greedy chain tau on the first turns of validation prompts, looping answers left out, in batches."""
    decode, recipe = decode or decode_keeping(), fitted(recipe, drafter)
    greedy = replace(recipe.eval, temperature=0.0, top_p=1.0, top_k=0, verifier="match", paths=1, draft_temperature=0.0)
    settings = settings_of("chain", greedy)
    encoded = [encode(target, recipe, prompt) for prompt in prompts]
    fitting = sorted((ids for ids in encoded if len(ids) <= longest_prompt(target, recipe.eval)), key=len)
    if not fitting:
        return 1.0

    def run(slots: int) -> Decoded:
        return decode(target, drafter, fitting, settings, matrix=None, row_ids=[*range(len(fitting))], slots=slots)

    rows = by_halving(UNTIMED_BATCH[target.device.type], run).rows
    kept = [row for row in rows if not is_loop(row.tokens)] or rows
    rounds = sum(row.rounds for row in kept)
    return sum(row.emitted for row in kept) / rounds if rounds else 1.0


def announce(bench: Bench, prompts: int) -> None:
    """Print what will be measured, max_new_tokens included, before the minutes pass."""
    e = bench.recipe.eval
    sampling = f"temperature {e.temperature:g}, top_p {e.top_p:g}, top_k {e.top_k}, seed {e.seed}"
    print(f"evaluating {prompts} prompts: max_new_tokens {e.max_new_tokens}, {sampling}, batch {e.batch_size}")
    for entry in bench.entries:
        state = f", matrix {entry.matrix}" if entry.matrix else ""
        print(f"  {entry.label}: {describe(entry.settings)}{state}{'' if entry.timed else ' (tau only, not timed)'}")


def warm_up(bench: Bench, spare: Sequence[Prompt]) -> None:
    """Feed the matrices, then one short untimed run of each timed decoder, so that no first-call cost is measured."""
    encoded = [encode(bench.target, bench.recipe, prompt) for prompt in spare]
    encoded = [ids for ids in encoded if len(ids) <= bench.limit]
    wanted = max((warm_prompts(entry.matrix) for entry in bench.entries), default=0)
    if wanted > len(encoded):
        at_hand = f"only {len(encoded)} are at hand that are not measured"
        raise UserError(f"eval.matrix asks for {wanted} warm-up prompts, {at_hand}. Use warm-{len(encoded)} or carried")
    for entry in bench.entries:
        if entry.matrix and entry.matrix != "cold":
            t = bench.target
            matrix = starting_matrix(entry.matrix, t.vocab_size, t.device, t.fingerprint)
            bench.matrices[entry.label] = matrix
            if batch := encoded[: warm_prompts(entry.matrix)]:
                by_halving(len(batch), partial(bench.run, entry.settings, batch, [*range(len(batch))], matrix))
    for entry in bench.entries:
        while entry.timed and encoded and attempt(partial(_first_run, bench, entry, encoded[-1])) is None:
            if bench.size == 1:
                raise UserError(f"out of memory: {entry.label} does not fit at batch 1. {SMALLER}")
            bench.shrink(bench.size)


def _first_run(bench: Bench, entry: Entry, ids: list[int]) -> Decoded:
    batch, first = [ids] * bench.size, FIRST_TOKENS[bench.target.device.type]
    short = replace(entry.settings, max_new_tokens=min(first, entry.settings.max_new_tokens))
    return bench.run(short, batch, list(range(len(batch))), new_matrix(bench.target) if entry.matrix else None)


def measure(bench: Bench, prompts: Sequence[Prompt]) -> None:
    """All timed decoders interleaved over batches of prompts, then the untimed ones in larger batches.

    Where memory runs out, everything is measured again in batches of half the size, so that all figures are of one
    size; a prompt that does not fit alone is named and left out.
    """
    kept, left_out = list(prompts), list[dict[str, Any]]()
    while (failed := _measure_timed(bench, kept)) is not None:
        if len(failed) > 1:
            bench.shrink(len(failed))
        else:
            left_out.append({"id": failed[0].id, "turn": 1, "reason": "out of memory"})
            print(f"out of memory at batch 1: {failed[0].id} is left out", flush=True)
            kept.remove(failed[0])
        bench.skipped = list(left_out)  # those of the next attempt are added to it
        if not kept:
            raise UserError(f"out of memory: no prompt fits, not even alone. {SMALLER}")
    for entry in bench.entries:
        if not entry.timed:
            measure_tau(bench, entry)


def _measure_timed(bench: Bench, prompts: Sequence[Prompt]) -> Sequence[Prompt] | None:
    """Fill `bench.outcomes`; returns the batch at which memory ran out, if it did."""
    bench.outcomes = {entry.label: [] for entry in bench.entries}
    timed = [entry for entry in bench.entries if entry.timed]
    size = bench.size
    columns = (
        TextColumn("evaluating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("prompts"),
        TimeRemainingColumn(),
    )
    with unpaused(), Progress(*columns, TextColumn("{task.fields[now]}")) as progress:
        task = progress.add_task("", total=len(prompts), now="")
        for number, start in enumerate(range(0, len(prompts), size)):
            batch = prompts[start : start + size]
            if not attempt(partial(measure_batch, bench, timed, batch, number)):
                return batch
            progress.update(task, advance=len(batch), now=_so_far(bench, timed[-1].label))
    return None


def measure_batch(bench: Bench, entries: list[Entry], prompts: Sequence[Prompt], number: int) -> bool:
    """One batch of prompts through its turns; the order of decoders is rotated by the batch's number."""
    histories: list[list[str]] = [[] for _ in prompts]
    fresh = {e.label: [Outcome(p.id, p.category, number) for p in prompts] for e in entries}
    matrices = {e.label: bench.matrix_of(e) for e in entries}  # a cold one serves the turns of this batch
    alive = list(range(len(prompts)))
    for turn in range(max(len(p.turns) for p in prompts)):
        alive = [i for i in alive if turn < len(prompts[i].turns)]
        ids = {i: encode(bench.target, bench.recipe, prompts[i], histories[i]) for i in alive}
        for i in alive:
            if len(ids[i]) > bench.limit:
                skipped = {"id": prompts[i].id, "turn": turn + 1, "tokens": len(ids[i]), "limit": bench.limit}
                bench.skipped.append(skipped)
        alive = [i for i in alive if len(ids[i]) <= bench.limit]
        if not alive:
            break
        row_ids = [row_id(prompts[i].id, turn) for i in alive]
        for k in range(len(entries)):
            entry = entries[(k + number) % len(entries)]
            matrix = matrices[entry.label]
            decoded = ready(partial(bench.run, entry.settings, [ids[i] for i in alive], row_ids, matrix), matrix)
            for i, row in zip(alive, decoded.rows, strict=True):
                fresh[entry.label][i].add(ids[i], row, decoded)
        for i in alive:
            histories[i].append(bench.target.tokenizer.decode(fresh["ar"][i].outputs[-1], skip_special_tokens=True))
    for label, outcomes in fresh.items():
        bench.outcomes[label] += [outcome for outcome in outcomes if outcome.outputs]
    return True


def measure_tau(bench: Bench, entry: Entry) -> None:
    """The same prompts (all turns, as `ar` saw them), a new one wherever one ends, for tau and outputs alone."""
    base = bench.outcomes["ar"]
    outcomes = [Outcome(o.id, o.category, o.batch) for o in base]
    work = [(i, turn, ids) for i, o in enumerate(base) for turn, ids in enumerate(o.prompts)]
    work.sort(key=lambda item: (item[1], len(item[2])))  # turns stay in order; rows of a batch are about as long

    row_ids, prompts = [row_id(base[i].id, turn) for i, turn, _ in work], [ids for _, _, ids in work]
    run = partial(bench.run, entry.settings, prompts, row_ids, bench.matrix_of(entry))
    decoded = by_halving(UNTIMED_BATCH[bench.target.device.type], run)
    for (i, _, ids), row in zip(work, decoded.rows, strict=True):
        outcomes[i].add(ids, row, decoded)
    bench.outcomes[entry.label] = outcomes


def _so_far(bench: Bench, label: str) -> str:
    rows = bench.outcomes[label]
    rounds = sum(o.rounds for o in rows)
    return f"{label} tau {sum(o.emitted for o in rows) / rounds:.2f}" if rounds else ""
