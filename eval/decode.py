"""The decoding loop around one target: propose a tree, verify it in one forward, accept a path, commit.

What is proposed differs from decoder to decoder (`eval.proposing`); the loop does not.
B rows, N nodes, D path positions, T prompt positions, C tap width, V vocabulary.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from eval.drafters import Drafter
from eval.engine import Clock, Engines, Facts
from eval.matrix import SuccessorMatrix
from eval.memory import ran_out
from eval.settings import Settings
from eval.tree import RETRIEVAL
from models.target import Target

STAGES = ("d0", "d1", "d5", "none")
TRIES = 3  # the first warms a GPU's steps up, the second records them


@dataclass
class RowResult:
    """One prompt's output and its rounds. `tokens` starts with the one that prefill yields: it belongs to no round."""

    tokens: list[int] = field(default_factory=list)
    rounds: int = 0
    emitted: int = 0  # tokens that rounds emitted and the cut left
    accepted: int = 0  # of these, drafts
    accepted_per_round: list[int] = field(default_factory=list)
    drafted_depth_per_round: list[int] = field(default_factory=list)
    positions_offered: list[int] = field(default_factory=list)  # rounds that drafted at depth j + 1, uncut
    positions_accepted: list[int] = field(default_factory=list)
    sources: dict[str, int] = field(default_factory=lambda: {"drafter": 0, "retrieval": 0})
    origins: list[str] = field(default_factory=list)  # of each token: drafter, retrieval, or bonus (the target's own)
    stages: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STAGES, 0))
    merged: int = 0  # retrieved nodes that the draft already had
    nodes: int = 0  # verified nodes over all rounds, roots not counted
    done: bool = False


@dataclass(frozen=True)
class Decoded:
    """`seconds` by phase (prefill apart); `decode_seconds` is the wall time after prefill; rounds are batch rounds."""

    rows: list[RowResult]
    seconds: dict[str, float]
    decode_seconds: float
    rounds_total: int
    unready: int = 0  # steps that a GPU warmed up or recorded on the way, which the clock counted


def record(row: RowResult, facts: Facts, ends: frozenset[int], limit: int) -> None:
    """Book one round of a row that is not done: its tokens up to an end token or the limit, and the counts."""
    emitted = 0
    for token in facts.said:
        row.tokens.append(token)
        emitted += 1
        if token in ends or len(row.tokens) >= limit:
            row.done = True
            break
    kept = min(facts.accepted, emitted)
    _book(row, kept, emitted, facts.drafted, cut=emitted <= facts.accepted)
    row.nodes += facts.nodes
    from_matrix = sum(source == RETRIEVAL for source in facts.sources[:kept])
    row.origins += ["retrieval" if source == RETRIEVAL else "drafter" for source in facts.sources[:kept]]
    row.origins += ["bonus"] * (emitted - kept)
    row.sources["retrieval"] += from_matrix
    row.sources["drafter"] += kept - from_matrix
    row.stages[STAGES[facts.stage]] += 1
    row.merged += facts.merged


def _book(row: RowResult, kept: int, emitted: int, drafted: int, cut: bool) -> None:
    """One round of a row: `kept` accepted drafts of `emitted` tokens; what was cut counts neither way."""
    row.rounds += 1
    row.emitted += emitted
    row.accepted += kept
    row.accepted_per_round.append(kept)
    row.drafted_depth_per_round.append(drafted)
    offered = kept if cut else drafted
    for counts in (row.positions_offered, row.positions_accepted):
        counts.extend([0] * (offered - len(counts)))
    for j in range(offered):
        row.positions_offered[j] += 1
        row.positions_accepted[j] += j < kept


def decode(
    target: Target,
    drafter: Drafter | None,
    prompts: list[list[int]],
    settings: Settings,
    matrix: SuccessorMatrix | None = None,
    row_ids: list[int] | None = None,
    engines: Engines | None = None,
    watch: Callable[[list[RowResult]], None] | None = None,
    slots: int = 0,
    ends: frozenset[int] | None = None,
) -> Decoded:
    """Decode prompts (token ids, ragged) side by side, `slots` at a time (0: all): the next one takes the place of the
    first that ends. `matrix` is carried: `graft` and `recycle` read and update it in place; without one they start
    cold. `row_ids` name the prompts' noise at T > 0, so that an output does not depend on its batch. `engines` keeps
    what is allocated and captured for the next call; `watch` sees the rows after prefill and after each round. `ends`
    are the tokens that end a row (None: the target's)."""
    ids, limit = row_ids or [*range(len(prompts))], settings.max_new_tokens
    ends = target.eos_ids if ends is None else ends
    slots = min(slots, len(prompts)) or len(prompts)
    engine = (engines or Engines()).get(target, drafter, settings, slots, max(map(len, prompts)))
    clock, start, unready = Clock(target.device), time.perf_counter(), engine.steps.unready

    def begun(first: int) -> RowResult:
        return RowResult([first], origins=["bonus"], done=first in ends or limit <= 1)

    rows = [begun(first) for first in engine.prefill(prompts[:slots], ids[:slots], matrix)]
    clock.lap("prefill")
    held, done, rounds = [*range(slots)], [False] * slots, 0  # held: the number of the prompt in each place
    while True:
        for place in range(slots):
            while rows[held[place]].done and len(rows) < len(prompts):
                held[place] = len(rows)
                rows.append(begun(engine.admit(place, prompts[len(rows)], ids[len(rows)], clock)))
                clock.lap("prefill")
        if done != [rows[number].done for number in held]:
            done = [rows[number].done for number in held]
            engine.finish(done)
        if watch is not None:
            watch(rows)
        if all(done):
            break
        for number, over, facts in zip(held, done, engine.round(clock, done), strict=True):
            if not over:
                record(rows[number], facts, ends, limit)
        rounds += 1
    wall = time.perf_counter() - start
    engine.save(matrix)
    seconds = clock.settle()
    return Decoded(rows, seconds, wall - seconds["prefill"], rounds, engine.steps.unready - unready)


def ready(run: Callable[[], Decoded], matrix: SuccessorMatrix | None) -> Decoded:
    """`run()`; where a GPU warmed up or recorded steps on the way, which takes longer than running them, once more from
    the same matrix, which `run` teaches: so that no clock counts that."""
    before = None if matrix is None else matrix.copy()
    for _ in range(TRIES - 1):
        decoded = run()
        if not decoded.unready:
            return decoded
        if matrix is not None:
            matrix.assign(before)
    return run()


def decode_keeping(longest: int = 0) -> Callable[..., Decoded]:
    """`decode` with engines of its own, for many calls on prompts of at most `longest` tokens (more make it slower);
    they are let go when memory runs out."""
    engines = Engines(longest=longest)

    def keeping(*given: Any, **named: Any) -> Decoded:
        nonlocal engines
        try:
            return partial(decode, engines=engines)(*given, **named)
        except (RuntimeError, MemoryError) as error:
            if ran_out(error):
                engines = Engines(longest=longest)
            raise

    return keeping
