"""Which rows make which optimiser step: a pure function of (seed, epoch), so that a cursor is all a resume needs.

Rows are shuffled, grouped by similar length inside windows of the shuffled order, and cut into optimiser steps of about
`batch_tokens`. A step is the same set of rows whatever the number of ranks; dealing it to ranks comes last.
B rows of a micro-batch, T positions.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from data_prep.rows import Rows
from recipes.schema import TrainConfig, UserError

WINDOW_STEPS = 16  # optimiser steps whose rows are sorted together: wider pads less, narrower shuffles better

Step = list[int]  # row indices


class Batch(NamedTuple):
    """A right-padded micro-batch; `answer` is 0 outside answers (data_prep.rows)."""

    ids_BT: Tensor
    answer_BT: Tensor


@dataclass(frozen=True)
class Cursor:
    """The next optimiser step to run: `step` counts over the whole run, `index` inside the epoch."""

    step: int = 0
    epoch: int = 0
    index: int = 0


def plan_epoch(lengths: np.ndarray, cfg: TrainConfig, seed: int, epoch: int) -> list[Step]:
    """The optimiser steps of one epoch; every row is in exactly one."""
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(lengths))
    reach = np.cumsum(lengths[order]) // max(1, WINDOW_STEPS * cfg.batch_tokens)
    groups: list[Step] = []
    for window in np.split(order, np.flatnonzero(np.diff(reach)) + 1):
        by_length = window[np.argsort(lengths[window], kind="stable")]
        cut = cut_padded(by_length.tolist(), lengths, min(cfg.micro_batch_tokens, cfg.batch_tokens))
        groups += [cut[i] for i in rng.permutation(len(cut))]
    return _merge(groups, lengths, cfg.batch_tokens)


def cut_padded(rows: list[int], lengths: np.ndarray, limit: int) -> list[list[int]]:
    """Cut a list of rows where its padded size (rows x longest) would pass `limit`; a longer row stands alone."""
    parts: list[list[int]] = []
    longest = 0
    for row in rows:
        longest = max(longest, int(lengths[row]))
        if parts and (len(parts[-1]) + 1) * longest <= limit:
            parts[-1].append(row)
        else:
            parts.append([row])
            longest = int(lengths[row])
    return parts


def _merge(groups: list[Step], lengths: np.ndarray, batch_tokens: int) -> list[Step]:
    """Join groups until a step is nearest to batch_tokens; a last step under half of that joins the one before."""
    steps: list[Step] = []
    size = 0
    for group in groups:
        more = int(lengths[group].sum())
        if steps and abs(size + more - batch_tokens) <= abs(size - batch_tokens):
            steps[-1] += group
            size += more
        else:
            steps.append(list(group))
            size = more
    if len(steps) > 1 and size * 2 < batch_tokens:
        stub = steps.pop()
        steps[-1] += stub
    return steps


def deal(step: Step, lengths: np.ndarray, micro_tokens: int, ranks: int) -> list[list[list[int]]]:
    """Per rank its micro-batches (lists of rows); as many for every rank, an empty list where a rank has none left.

    Longest rows first, each to the rank with the fewest tokens so far, ties to the lower rank.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for row in sorted(step, key=lambda r: (-int(lengths[r]), r)):
        rank = load.index(min(load))
        shares[rank].append(row)
        load[rank] += int(lengths[row])
    cuts = [cut_padded(share[::-1], lengths, micro_tokens) for share in shares]
    most = max(len(cut) for cut in cuts)
    return [cut + [[] for _ in range(most - len(cut))] for cut in cuts]


def load_batch(rows: Rows, indices: list[int]) -> Batch:
    """Pad rows to the longest, on the host. No indices give two unsupervised positions: every rank takes part."""
    loaded = [rows.row(i) for i in indices] or [(torch.zeros(2).long(), torch.zeros(2).int())]
    longest = max(len(ids) for ids, _ in loaded)
    ids_BT = torch.zeros(len(loaded), longest, dtype=torch.int64)
    answer_BT = torch.zeros(len(loaded), longest, dtype=torch.int32)
    for b, (ids, answer) in enumerate(loaded):
        ids_BT[b, : len(ids)], answer_BT[b, : len(ids)] = ids, answer
    return Batch(ids_BT, answer_BT)


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

    def walk(self, cursor: Cursor) -> Iterator[tuple[Step, Cursor]]:
        """Rows of each step still to run, with the cursor that follows it."""
        while cursor.step < self.total:
            steps = self.epoch(cursor.epoch)
            rows = steps[cursor.index]
            last = cursor.index + 1 == len(steps)
            cursor = Cursor(cursor.step + 1, cursor.epoch + last, 0 if last else cursor.index + 1)
            yield rows, cursor

    def epochs_done(self, cursor: Cursor) -> float:
        return cursor.epoch + (cursor.index / len(self.epoch(cursor.epoch)) if cursor.index else 0.0)

    def ends_epoch(self, cursor: Cursor) -> bool:
        """Whether an epoch, or the run, has just ended."""
        return cursor.step > 0 and (cursor.index == 0 or cursor.step >= self.total)
