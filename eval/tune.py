"""Choose decoder, draft length and tree size for this machine, by measurement.

On a CPU a verified row costs real time and on a GPU a drafter step does, so the best setting depends on both the head
and the machine. Every candidate decodes the same validation prompts, interleaved prompt by prompt, so that all of them
see the same text and the same weather. A candidate's speed is predicted as

    tokens a round (sums over the prompts; greedy rounds are deterministic)  /  median cost of a round

which is steadier than tokens over seconds; verification's part of the cost is pooled over the candidates that verify
equally many rows. The field shrinks as prompts are added: all candidates, then the best few,
then a run-off of three. `ar` runs everywhere, and wins when nothing beats it.
"""

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from data_prep.prompts import Prompt
from eval.decode import Decoded, decode_keeping
from eval.matrix import SuccessorMatrix
from eval.outcome import STAGES, encode, in_dtype, longest_prompt, new_matrix, row_id
from eval.plan import asked, describe, settings_of
from eval.results import environment
from eval.settings import GATED, Settings
from models.eagle3 import Eagle3
from models.target import Target
from recipes.cli import entry
from recipes.files import write_json
from recipes.schema import DECODERS, Recipe, UserError

FILE = "tuned.json"
WARM_PROMPTS = 3
FIRST_TOKENS = 4  # of the first run of each candidate, which compiles, allocates and faults pages in
# (batches of prompts, tokens each, batches even when the budget is spent): everybody, the best few, the run-off
ROUNDS = ((3, 16, 2), (4, 32, 0), (6, 40, 3))
FEW, FINALISTS = 6, 3
GRID_BATCHES = 8  # of prompts, on which all candidates are measured when the choice is judged
BUDGET_SECONDS = 60.0
SCREENING = 0.6  # share of the budget for the first round
HOPELESS = (0.6, 0.75)  # share of the best speed below which a setting drops out after one prompt, and after more
CHAINS_CPU, CHAINS_GPU = (1, 2, 3, 5), (1, 2, 3, 4, 5, 7)
TREES_CPU = ((2, 1), (3, 1), (3, 2), (4, 2), (7, 3), (9, 4))  # (nodes, depth)
WIDE = ((3, 2), (5, 2), (8, 3), (16, 4), (32, 6), (60, 10))  # (nodes, branch) of talon and recycle
COPIES = (3, 6, 10, 40)  # lengths of lookup and suffix
HIGHER_GATES = 3  # graft is also tried with gates this much higher: stop sooner, retrieve more
TREES_GPU = tuple(
    (nodes, depth) for nodes in (8, 16, 24, 32, 48, 60) for depth in (2, 3, 4, 6, 8) if 2 * depth <= nodes
)


@dataclass
class Trial:
    """What one candidate did: a number a call (one batch of prompts) in each list."""

    settings: Settings
    matrix: SuccessorMatrix | None = None
    emitted: list[int] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    batch_rounds: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    stages: list[dict[str, float]] = field(default_factory=list)
    prompts: int = 1  # of a call
    rows: list[int] = field(default_factory=list)  # verified in a round, a prompt
    pool: dict[int, list[float]] = field(default_factory=dict)  # verification ms by rows, shared by all trials

    def add(self, decoded: Decoded, limit: int) -> None:
        """Book one call. Answers of tuning are short, so the round that `limit` cut is left out of tau: it would weigh
        on long drafts more than it does in long answers."""
        whole = [row.rounds - (len(row.tokens) >= limit and row.rounds > 1) for row in decoded.rows]
        said = [
            row.emitted if whole_rounds == row.rounds else sum(row.accepted_per_round[:whole_rounds]) + whole_rounds
            for row, whole_rounds in zip(decoded.rows, whole, strict=True)
        ]
        self.emitted.append(sum(said))
        self.rounds.append(sum(whole))
        self.prompts = len(decoded.rows)
        self.batch_rounds.append(decoded.rounds_total)
        self.seconds.append(decoded.decode_seconds)
        self.stages.append(decoded.seconds)
        rows = 1 + round(sum(row.nodes for row in decoded.rows) / max(1, sum(row.rounds for row in decoded.rows)))
        self.rows.append(rows)
        if decoded.rounds_total:
            self.pool.setdefault(rows, []).append(1000 * decoded.seconds.get("verify", 0.0) / decoded.rounds_total)

    @property
    def tau(self) -> float:
        return sum(self.emitted) / max(sum(self.rounds), 1)

    @property
    def ms_per_round(self) -> float:
        """Cost of a (batch) round: verifying so many rows as all candidates saw it, and the rest as this one did.

        Medians over calls. Candidates that verify equally many rows pay the same for it, so they share the measurement.
        """
        rest = [s - t.get("verify", 0.0) for s, t in zip(self.seconds, self.stages, strict=True)]
        costs = [1000 * s / r for s, r in zip(rest, self.batch_rounds, strict=True) if r]
        shared = [statistics.median(self.pool[rows]) for rows in self.rows if rows in self.pool]
        return statistics.median(costs) + statistics.median(shared) if costs and shared else 0.0

    def stage_ms(self, stage: str) -> float:
        costs = [1000 * s.get(stage, 0.0) / r for s, r in zip(self.stages, self.batch_rounds, strict=True) if r]
        return statistics.median(costs) if costs else 0.0

    @property
    def speed(self) -> float:
        """Predicted tokens/s of a full batch: tokens a round over the cost of one."""
        cost = self.ms_per_round
        return 1000 * self.prompts * self.tau / cost if cost else 0.0

    def record(self) -> dict[str, Any]:
        s = self.settings
        return {
            "decoder": s.decoder,
            "shape": describe(s),
            "depth": s.depth,
            "branch": s.branch,
            "nodes": s.nodes,
            "gates": list(s.gates),
            "rows": verified_rows(s),
            "calls": len(self.seconds),
            "tokens": sum(self.emitted),
            "tau": self.tau,
            "ms_per_round": self.ms_per_round,
            "ms_by_stage": {stage: self.stage_ms(stage) for stage in STAGES},
            "tokens_per_s": self.speed,
        }


def tune(
    recipe: Recipe,
    target: Target,
    drafter: Eagle3,
    prompts: Sequence[Prompt],
    folder: Path | None = None,
    *,
    decode: Callable[..., Decoded] | None = None,
    budget: float = BUDGET_SECONDS,
    settings: Sequence[Settings] | None = None,
) -> dict[str, Any]:
    """Measure, choose, and return tuned.json (written beside the drafter when `folder` is given).

    The first prompts warm graft's matrix, the others are decoded; none of them may be among the measured ones.
    """
    drafter, decode = in_dtype(drafter, target.dtype), decode or decode_keeping()
    start = time.perf_counter()
    warm, batches = _prompts(recipe, target, prompts)
    base = warm_matrix(target, drafter, recipe, warm, decode)
    trials = _trials(settings or candidates(recipe, target.device.type), base)
    prompts_used = min(len(batches), sum(count for count, *_ in ROUNDS))
    print(f"tuning: {len(trials)} settings on {prompts_used} validation prompts or batches, about {budget:.0f} s")
    run = _runner(target, drafter, decode)
    for trial in trials:
        run(replace_tokens(trial, FIRST_TOKENS), *batches[0])
    finalists = race(trials, batches, run, lambda: (time.perf_counter() - start) / max(budget, 1e-9))
    best = max(finalists, key=lambda trial: trial.speed)
    tuned = {
        "schema": 1,
        "measured_on": environment(target),
        "target": target.fingerprint,
        "batch_size": recipe.eval.batch_size,
        "temperature": recipe.eval.temperature,
        "asked": asked(recipe),
        "seconds": time.perf_counter() - start,
        "chosen": best.record(),
        "best": best_by_decoder(trials),
        "table": [trial.record() for trial in sorted(trials, key=lambda t: (-len(t.seconds), -t.speed))],
        "cost_curve": cost_curve(trials),
    }
    if folder is not None and os.access(folder, os.W_OK):
        write_json(folder / FILE, tuned)
    print(f"tuned in {tuned['seconds']:.0f} s: {best.settings.decoder}, {describe(best.settings)}")
    return tuned


def race(
    trials: list[Trial], batches: list["Batch"], run: Callable[..., Decoded], spent: Callable[[], float]
) -> list[Trial]:
    """Give every trial still in the race the same next prompts; returns the finalists. `spent`: share of the budget."""
    left, used = trials, 0
    for number, (count, tokens, least) in enumerate(ROUNDS):
        for done, batch in enumerate(batches[used : used + count]):
            if done >= least and spent() > (SCREENING if number == 0 else 1):
                break
            for trial in rotated(left, used):
                short = replace_tokens(trial, tokens)
                trial.add(run(short, *batch), short.settings.max_new_tokens)
            used += 1
            if number == 0:
                bar = HOPELESS[min(done, 1)] * max(trial.speed for trial in left)
                left = [trial for trial in left if trial.speed > bar or trial.settings.decoder == "ar"]
        left = shrink(left, FEW if number == 0 else FINALISTS)
    return left


def measured_grid(
    recipe: Recipe,
    target: Target,
    drafter: Eagle3,
    prompts: Sequence[Prompt],
    *,
    tokens: int = 32,
    decode: Callable[..., Decoded] | None = None,
    settings: Sequence[Settings] | None = None,
) -> list[dict[str, Any]]:
    """Every candidate on the same prompts, interleaved: what the tuner's choice is judged against. Fastest first."""
    drafter, decode = in_dtype(drafter, target.dtype), decode or decode_keeping()
    warm, batches = _prompts(recipe, target, prompts)
    base = warm_matrix(target, drafter, recipe, warm, decode)
    trials = _trials(settings or candidates(recipe, target.device.type), base)
    run = _runner(target, drafter, decode)
    for trial in trials:
        run(replace_tokens(trial, FIRST_TOKENS), *batches[0])
    for number, batch in enumerate(batches[:GRID_BATCHES]):
        for trial in rotated(trials, number):
            short = replace_tokens(trial, tokens)
            trial.add(run(short, *batch), short.settings.max_new_tokens)
    return [trial.record() for trial in sorted(trials, key=lambda trial: -trial.speed)]


def shortfall(grid: list[dict[str, Any]], chosen: dict[str, Any]) -> float:
    """How far the chosen setting is below the best of a measured grid, as a share of the best."""
    keys = ("decoder", "depth", "branch", "nodes", "gates")
    mine = next((row for row in grid if all(row[key] == chosen[key] for key in keys)), None)
    if mine is None:
        raise ValueError(f"{chosen['decoder']} ({chosen['shape']}) is not in the grid")
    return 1 - mine["tokens_per_s"] / max(row["tokens_per_s"] for row in grid)


def candidates(recipe: Recipe, device: str) -> list[Settings]:
    """`ar`, lines of a few lengths, and one set of tree budgets for eagle, prune and graft, within the recipe's."""
    e = recipe.eval
    names = [recipe.decoder] if recipe.decoder else list(dict.fromkeys(e.decoders))
    gpu = device == "cuda"
    shapes = [(n, d) for n, d in (TREES_GPU if gpu else TREES_CPU) if n <= e.nodes and d <= e.depth] or [
        (e.nodes, e.depth)
    ]
    found = [settings_of("ar", e)]
    lengths = {"chain": CHAINS_GPU if gpu else CHAINS_CPU, "lookup": COPIES[:3], "suffix": COPIES}
    for name in names:
        found += [settings_of(name, e, depth=k, nodes=k) for k in lengths.get(name, ())]
        if name in ("eagle", "prune", "graft"):
            found += [settings_of(name, e, nodes=n, depth=d, branch=min(e.branch, n)) for n, d in shapes]
        if name in ("talon", "recycle"):
            small = [(n, k) for n, k in WIDE if n <= e.nodes]
            found += [settings_of(name, e, nodes=n, branch=min(e.branch, k)) for n, k in small]
    roomy = [s for s in found if s.decoder in GATED and s.depth > 1 and s.nodes > 3]
    return found + [replace(s, gates=tuple(min(0.9, HIGHER_GATES * g) for g in s.gates)) for s in roomy if any(s.gates)]


def verified_rows(settings: Settings) -> int:
    """Rows of one verification: the drafts and the root."""
    return 1 if settings.decoder == "ar" else settings.nodes + 1


def cost_curve(trials: Sequence[Trial]) -> dict[str, dict[str, float]]:
    """Median milliseconds of a verification by rows, and of drafting by depth, where the shape is fixed."""
    fixed = [t for t in trials if t.seconds and t.settings.decoder in ("ar", "chain", "eagle")]
    verify: dict[int, list[float]] = {}
    draft: dict[int, list[float]] = {}
    for trial in fixed:
        verify.setdefault(verified_rows(trial.settings), []).append(trial.stage_ms("verify"))
        if trial.settings.decoder != "ar":
            draft.setdefault(trial.settings.depth, []).append(trial.stage_ms("draft"))
    return {
        "verify_ms_by_rows": {str(k): statistics.median(v) for k, v in sorted(verify.items())},
        "draft_ms_by_depth": {str(k): statistics.median(v) for k, v in sorted(draft.items())},
    }


def warm_matrix(
    target: Target, drafter: Eagle3, recipe: Recipe, warm: list[list[int]], decode: Callable[..., Decoded]
) -> SuccessorMatrix:
    """The matrix that every graft candidate starts from: a few prompts decoded with a small tree."""
    matrix = new_matrix(target)
    if warm:
        e = recipe.eval
        settings = settings_of(
            "graft", e, nodes=min(6, e.nodes), depth=min(2, e.depth), max_new_tokens=min(32, e.max_new_tokens)
        )
        decode(target, drafter, warm, settings, matrix=matrix, row_ids=list(range(len(warm))))
    return matrix


def best_by_decoder(trials: Sequence[Trial]) -> dict[str, dict[str, Any]]:
    """The fastest setting of each decoder, among those that ran the most prompts."""
    best = {}
    for name in DECODERS[1:]:
        mine = [trial for trial in trials if trial.settings.decoder == name]
        if mine:
            most = max(len(trial.seconds) for trial in mine)
            best[name] = max((t for t in mine if len(t.seconds) == most), key=lambda t: t.speed).record()
    return best


def shrink(trials: Sequence[Trial], keep: int) -> list[Trial]:
    """The `keep` fastest, and `ar` whatever its place."""
    order = sorted(trials, key=lambda trial: -trial.speed)
    return order[:keep] + [trial for trial in order[keep:] if trial.settings.decoder == "ar"]


def rotated(trials: Sequence[Trial], by: int) -> list[Trial]:
    by %= len(trials)
    return [*trials[by:], *trials[:by]]


def replace_tokens(trial: Trial, tokens: int) -> Trial:
    """The same candidate asked for fewer tokens; the matrix is shared, the lists are not."""
    return Trial(replace(trial.settings, max_new_tokens=min(tokens, trial.settings.max_new_tokens)), trial.matrix)


def read(folder: Path, recipe: Recipe, target: Target) -> dict[str, Any] | None:
    """tuned.json beside a drafter, if it was measured on a machine and a batch like these; else None, said aloud."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        tuned: dict[str, Any] = json.loads(path.read_text())
        then, now = tuned["measured_on"], environment(target)
        same = ["device", "hardware", "dtype", "threads"]
        differs = [f"{key} {then[key]} (now {now[key]})" for key in same if then[key] != now[key]]
        wanted = {
            "batch_size": recipe.eval.batch_size,
            "temperature": recipe.eval.temperature,
            "target": target.fingerprint,
            "asked": asked(recipe),
        }
        differs += [f"{key} {tuned[key]} (now {value})" for key, value in wanted.items() if tuned[key] != value]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is not a tuned.json of ours ({error}). Delete it; eval.tune=true measures again"
        ) from error
    if differs:
        print(f"{path} is set aside: measured with {', '.join(differs)}")
        return None
    return tuned


def _trials(settings: Sequence[Settings], base: SuccessorMatrix) -> list[Trial]:
    """One a setting, with a matrix of its own and the verification costs in common."""
    pool: dict[int, list[float]] = {}
    return [Trial(s, base.copy() if s.remembers else None, pool=pool) for s in settings]


Batch = tuple[list[list[int]], list[int]]  # prompts of one call, and their row ids


def _runner(target: Target, drafter: Eagle3, decode: Callable[..., Decoded]) -> Callable[..., Decoded]:
    def run(trial: Trial, batch: list[list[int]], row_ids: list[int]) -> Decoded:
        helper = drafter if trial.settings.drafts else None
        return decode(target, helper, batch, trial.settings, matrix=trial.matrix, row_ids=row_ids)

    return run


def _prompts(recipe: Recipe, target: Target, prompts: Sequence[Prompt]) -> tuple[list[list[int]], list[Batch]]:
    """(prompts that warm the matrix, batches to decode); every second prompt warms until there are enough."""
    limit = longest_prompt(target, recipe.eval)
    named = [(p.id, encode(target, recipe, p)) for p in prompts]
    named = [(name, ids) for name, ids in named if len(ids) <= limit]
    if not named:
        raise UserError(
            "tuning needs validation prompts that fit the model and are not measured themselves. Or: eval.tune=false"
        )
    warming = min(WARM_PROMPTS, len(named) // 3)
    warm, rest = [ids for _, ids in named[:warming]], named[warming:]
    size = recipe.eval.batch_size
    while len(rest) < size:
        rest = rest + rest
    batches = []
    for start in range(0, len(rest) - size + 1, size):
        part = rest[start : start + size]
        batches.append(([ids for _, ids in part], [row_id(name, 0) for name, _ in part]))
    return warm, batches


def main(recipe: Recipe) -> None:
    """`python -m eval.tune recipe=NAME drafter=DIR`: tune, then judge the choice on a measured grid."""
    from eval.outcome import warmup_prompts
    from eval.run import load

    target, drafter, folder = load(recipe)
    prompts = warmup_prompts()
    tuned = tune(recipe, target, drafter, prompts, folder)
    grid = measured_grid(recipe, target, drafter, prompts)
    tuned["grid"] = grid
    tuned["shortfall"] = shortfall(grid, tuned["chosen"])
    write_json(folder / FILE, tuned)
    for row in grid:
        figures = f"tau {row['tau']:.2f}  {row['ms_per_round']:7.1f} ms  {row['tokens_per_s']:6.1f} tokens/s"
        print(f"{row['decoder']:6} {row['shape']:50} {figures}")
    print(f"the choice is {100 * tuned['shortfall']:.1f} % below the best of the grid; written to {folder / FILE}")


if __name__ == "__main__":
    entry(main)
