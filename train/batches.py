"""Which rows make which optimiser step: a pure function of (seed, epoch), so that a cursor is all a resume needs.

Rows are shuffled, packed into micro-batches inside windows of the shuffled order, and the micro-batches joined to
optimiser steps of about `batch_tokens`. A step is the same set of rows whatever the number of ranks; dealing it to
ranks comes last. A micro-batch is one flat row of whole documents, T tokens, and nothing is padded.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from data_prep.rows import Rows
from recipes.schema import TrainConfig, UserError

WINDOW_STEPS = 16  # optimiser steps whose rows are packed together: wider fills better, narrower shuffles better
IDLE = 2  # unsupervised tokens that a rank runs where the others have a micro-batch more

Pack = list[int]  # indices of the rows of a micro-batch
Step = list[Pack]


class Batch(NamedTuple):
    """A packed micro-batch: whole documents end to end."""

    ids_T: Tensor
    answer_T: Tensor  # 0 outside answers and at the first token of a document
    lengths: list[int]  # of the documents
    rows: Sequence[int] = ()  # the indices of the documents; none where they are no rows


@dataclass(frozen=True)
class Cursor:
    """The next optimiser step to run: `step` counts over the whole run, `index` inside the epoch."""

    step: int = 0
    epoch: int = 0
    index: int = 0


def plan_epoch(lengths: np.ndarray, cfg: TrainConfig, seed: int, epoch: int) -> list[Step]:
    """The optimiser steps of one epoch; every row is in exactly one. Micro-batches are planned for one rank."""
    rng = np.random.default_rng([seed, epoch])
    parts = -(-cfg.batch_tokens // cfg.micro_batch_tokens)
    limit = -(-cfg.batch_tokens // parts)  # at most micro_batch_tokens, and `parts` of them are a step
    order = rng.permutation(len(lengths))
    reach = np.cumsum(lengths[order]) // (WINDOW_STEPS * cfg.batch_tokens)
    packs: list[Pack] = []
    emptiest: Pack = []  # of one window goes into the next
    for window in np.split(order, np.flatnonzero(np.diff(reach)) + 1):
        found = pack([*emptiest, *window.tolist()], lengths, limit)
        emptiest = found.pop(int(np.argmin([lengths[p].sum() for p in found])))
        packs += [found[i] for i in rng.permutation(len(found))]
    return _join([*packs, emptiest], lengths, cfg.batch_tokens)


def pack(rows: list[int], lengths: np.ndarray, limit: int) -> list[Pack]:
    """Fill packs of at most `limit` tokens, longest row first, each into the fullest pack that still has room for it
    (best-fit decreasing); a row longer than the limit stands alone."""
    packs: list[Pack] = []
    room: list[tuple[int, int]] = []  # (tokens left, pack), ascending
    for row in sorted(rows, key=lambda r: (-int(lengths[r]), r)):
        size = int(lengths[row])
        at = bisect_left(room, (size, 0))
        left, number = room.pop(at) if at < len(room) else (max(limit, size), len(packs))
        if number == len(packs):
            packs.append([])
        packs[number].append(row)
        insort(room, (left - size, number))
    return packs


def _join(packs: list[Pack], lengths: np.ndarray, batch_tokens: int) -> list[Step]:
    """Join packs until a step is nearest to batch_tokens; a last step under half of that joins the one before."""
    steps: list[Step] = []
    size = 0
    for one in packs:
        more = int(lengths[one].sum())
        if steps and abs(size + more - batch_tokens) <= abs(size - batch_tokens):
            steps[-1].append(one)
            size += more
        else:
            steps.append([one])
            size = more
    if len(steps) > 1 and size * 2 < batch_tokens:
        stub = steps.pop()
        steps[-1] += stub
    return steps


def deal(step: Step, lengths: np.ndarray, micro_tokens: int, ranks: int) -> list[list[Pack]]:
    """Per rank its micro-batches; as many for every rank, an empty one where a rank has none left.

    The planned packs where the ranks divide them evenly; else their rows, longest first, each to the emptiest of as
    many packs as are needed, so that all ranks have about as much to do.
    """
    packs = sorted(step, key=lambda p: -int(lengths[p].sum())) if len(step) % ranks == 0 else []
    count = -(-len(step) // ranks) * ranks
    while not packs:
        packs = _spread([row for planned in step for row in planned], lengths, count)
        if any(len(p) > 1 and int(lengths[p].sum()) > micro_tokens for p in packs):
            packs, count = [], count + ranks
    return [packs[rank::ranks] for rank in range(ranks)]


def _spread(rows: list[int], lengths: np.ndarray, count: int) -> list[Pack]:
    packs: list[Pack] = [[] for _ in range(count)]
    load = [0] * count
    for row in sorted(rows, key=lambda r: (-int(lengths[r]), r)):
        emptiest = load.index(min(load))
        packs[emptiest].append(row)
        load[emptiest] += int(lengths[row])
    return packs


def load_batch(rows: Rows, indices: Pack) -> Batch:
    """Join rows end to end, on the host. No indices give unsupervised tokens: every rank takes part.

    No slot predicts or is fed the first token of a document in its own document, so its mark goes; that parts the
    answers of neighbours, where a row ends and the next begins with one.
    """
    loaded = [rows.row(i) for i in indices] or [(torch.zeros(IDLE).long(), torch.zeros(IDLE).int())]
    lengths = [len(ids) for ids, _ in loaded]
    answer_T = torch.cat([answer for _, answer in loaded])
    answer_T[list(accumulate(lengths[:-1], initial=0))] = 0
    return Batch(torch.cat([ids for ids, _ in loaded]), answer_T, lengths, indices)


@dataclass
class Usage:
    """What micro-batches hold, over all ranks."""

    tokens: int = 0  # of rows
    idle: int = 0  # run through the models without being a token of a row
    pairs: int = 0  # of a token and one that it sees in its own row
    budget: int = 0  # what the micro-batches could have held

    def add(self, shares: list[list[Pack]], lengths: np.ndarray, micro_tokens: int) -> None:
        for one in (p for share in shares for p in share):
            tokens = int(lengths[one].sum())
            self.tokens += tokens
            self.pairs += sum(int(lengths[row]) * (int(lengths[row]) + 1) // 2 for row in one)
            self.idle += 0 if one else IDLE
            self.budget += max(micro_tokens, tokens)

    @property
    def figures(self) -> dict[str, float]:
        """`padding`: share of the positions run that are no token of a row. `filled`: share of the micro-batch budget
        that tokens of rows take."""
        ran = max(1, self.tokens + self.idle)
        return {"padding": round(self.idle / ran, 5), "filled": round(self.tokens / max(1, self.budget), 5)}


class Schedule:
    """All optimiser steps of a run, walked by cursor. `max_steps`, when given, replaces `epochs`."""

    def __init__(self, lengths: Tensor | np.ndarray, cfg: TrainConfig, seed: int) -> None:
        if len(lengths) == 0:
            raise UserError("the training data hold no rows. Give data.sources more prompts, or loosen its filters.")
        self.lengths, self.cfg, self.seed = np.asarray(lengths), cfg, seed
        self._cached: tuple[int, list[Step]] = (-1, [])
        self.total = cfg.max_steps or sum(len(self.epoch(e)) for e in range(cfg.epochs))

    def epoch(self, epoch: int) -> list[Step]:
        if self._cached[0] != epoch:
            self._cached = (epoch, plan_epoch(self.lengths, self.cfg, self.seed, epoch))
        return self._cached[1]

    def usage(self, ranks: int) -> Usage:
        """Of the first epoch, its last step included."""
        usage, micro = Usage(), self.cfg.micro_batch_tokens
        for step in self.epoch(0):
            usage.add(deal(step, self.lengths, micro, ranks), self.lengths, micro)
        return usage

    def walk(self, cursor: Cursor) -> Iterator[tuple[Step, Cursor]]:
        """Each step still to run, with the cursor that follows it."""
        while cursor.step < self.total:
            steps = self.epoch(cursor.epoch)
            step = steps[cursor.index]
            last = cursor.index + 1 == len(steps)
            cursor = Cursor(cursor.step + 1, cursor.epoch + last, 0 if last else cursor.index + 1)
            yield step, cursor

    def epochs_done(self, cursor: Cursor) -> float:
        return cursor.epoch + (cursor.index / len(self.epoch(cursor.epoch)) if cursor.index else 0.0)

    def ends_epoch(self, cursor: Cursor) -> bool:
        """Whether an epoch, or the run, has just ended."""
        return cursor.step > 0 and (cursor.index == 0 or cursor.step >= self.total)
