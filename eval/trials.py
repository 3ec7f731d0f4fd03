"""Candidates of the tuner: what each did, what a round of it cost, and which of them lead.

Trials that verify equally many rows share the measurement of that, since it costs them the same.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from eval import stats
from eval.decode import Decoded
from eval.matrix import SuccessorMatrix
from eval.memory import attempt, too_many
from eval.outcome import STAGES
from eval.plan import POLICY, describe
from eval.settings import Settings
from recipes.schema import DECODERS

FIRST_TOKENS = 4  # of the first run of each candidate, which compiles, allocates and faults pages in

Rows = tuple[int, bool]  # verified in a round, and whether masks went with them
Batch = tuple[list[list[int]], list[int], bool]  # prompts of one call, their row ids, whether one was decoded before


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
    pool: dict[Rows, list[float]] = field(default_factory=dict)  # verification ms by rows, shared by all trials
    fits: bool = True  # memory has held it so far

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
            cost = 1000 * decoded.seconds.get("verify", 0.0) / decoded.rounds_total
            self.pool.setdefault((rows, self.settings.parallel), []).append(cost)

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
        known = [(rows, self.settings.parallel) for rows in self.rows]
        shared = [statistics.median(self.pool[rows]) for rows in known if rows in self.pool]
        return statistics.median(costs) + statistics.median(shared) if costs and shared else 0.0

    def stage_ms(self, stage: str) -> float:
        costs = [1000 * s.get(stage, 0.0) / r for s, r in zip(self.stages, self.batch_rounds, strict=True) if r]
        return statistics.median(costs) if costs else 0.0

    @property
    def speed(self) -> float:
        """Predicted tokens/s of a full batch: tokens a round over the cost of one."""
        cost = self.ms_per_round
        return 1000 * self.prompts * self.tau / cost if cost else 0.0

    @property
    def least_speed(self) -> float:
        """The same where tokens a round are as few as one resample in ten of the calls has them; the cost of a round,
        which varies less, as it is."""
        ends, tau = stats.ratio_interval(self.emitted, self.rounds, level=0.8), self.tau
        return self.speed * ends[0] / tau if ends and tau else 0.0

    def record(self) -> dict[str, Any]:
        s = self.settings
        return {
            "decoder": s.decoder,
            "shape": describe(s),
            "depth": s.depth,
            "branch": s.branch,
            "nodes": s.nodes,
            "gates": list(s.gates),
            **{key: getattr(s, key) for key in POLICY},
            "parallel": s.parallel,
            "rows": 1 + s.most,
            "calls": len(self.seconds),
            "tokens": sum(self.emitted),
            "tau": self.tau,
            "ms_per_round": self.ms_per_round,
            "ms_by_stage": {stage: self.stage_ms(stage) for stage in STAGES},
            "tokens_per_s": self.speed,
            "least_tokens_per_s": self.least_speed,
        }


def trials_of(settings: Sequence[Settings], base: SuccessorMatrix) -> list[Trial]:
    """One a setting, with a matrix of its own and the verification costs in common."""
    pool: dict[Rows, list[float]] = {}
    return [Trial(s, base.copy() if s.remembers else None, pool=pool) for s in settings]


def decoded_by(
    trials: Sequence[Trial], run: Callable[..., Decoded], batch: Batch, tokens: int, book: bool = True
) -> list[Trial]:
    """Every trial on one batch; those that memory does not hold, not even when what others left in it is gone, are left
    out, and `ar` must fit."""
    found = []
    for trial in trials:
        short = replace_tokens(trial, tokens)
        once = partial(run, short, *batch)
        decoded = attempt(once) or attempt(once)
        trial.fits = decoded is not None
        if decoded is not None:
            found.append(trial)
            if book:
                trial.add(decoded, short.settings.max_new_tokens)
        elif trial.settings.decoder == "ar":
            raise too_many(len(batch[0]))
        else:
            print(f"out of memory: {trial.settings.decoder}, {describe(trial.settings)} is left out")
    return found


def choose(trials: Sequence[Trial]) -> Trial:
    """The fastest of what surely beats `ar`, a few prompts' luck allowed for; `ar` where nothing does."""
    plain = next(trial for trial in trials if trial.settings.decoder == "ar")
    return max((t for t in trials if t.least_speed > plain.speed), key=lambda t: t.speed, default=plain)


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


def cost_curve(trials: Sequence[Trial]) -> dict[str, dict[str, float]]:
    """Median milliseconds of a verification by rows, and of drafting by depth, where the shape is fixed."""
    fixed = [t for t in trials if t.seconds and t.settings.decoder in ("ar", "chain", "eagle")]
    verify: dict[int, list[float]] = {}
    draft: dict[int, list[float]] = {}
    for trial in fixed:
        verify.setdefault(1 + trial.settings.most, []).append(trial.stage_ms("verify"))
        if trial.settings.decoder != "ar":
            draft.setdefault(trial.settings.depth, []).append(trial.stage_ms("draft"))
    return {
        "verify_ms_by_rows": {str(k): statistics.median(v) for k, v in sorted(verify.items())},
        "draft_ms_by_depth": {str(k): statistics.median(v) for k, v in sorted(draft.items())},
    }
