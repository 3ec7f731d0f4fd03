"""What is learned: the teacher, the loss of EAGLE-3's training-time test, and what is measured beside it.

Slot p sees the features of x[0..p] and the embedding of x[p+1+i] at unroll step i, and predicts x[p+2+i]; its teacher
is the target's distribution at position q = p+1+i. Sources: EAGLE-3 (arXiv 2503.01840) and its code, for the soft
cross-entropy on kept vocabulary; the normaliser (mean over the whole optimiser step) is ours.
T tokens of a packed micro-batch, H hidden, C features, V vocabulary, Vd kept vocabulary, S unroll steps, m positions
that teach some slot, n slots: of all unroll steps together, the supervised ones.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data_prep.supervision import supervised, teaching
from models.attention import Documents, sent
from models.eagle3 import Eagle3
from models.target import Target
from models.unroll_attention import Asking
from models.vocab import VocabMap
from recipes.schema import EagleConfig
from train.batches import Batch, Pack
from train.features import Teacher
from train.fused_loss import Teaching, fused_loss
from train.losses import Judged, Loss
from train.telemetry import Arithmetic, drafter_arithmetic, target_arithmetic

# rows of the metric sums [7, S], each additive over micro-batches, ranks and optimiser steps
LOSS, KEPT, SUPERVISED, CORRECT, OVERLAP, AT_RISK, SURVIVED = range(7)


def step_weights(steps: int, decay: float) -> list[float]:
    """decay^i over their sum, so that the loss scale does not depend on the unroll length."""
    total = sum(decay**i for i in range(steps))
    return [decay**i / total for i in range(steps)]


def survival(match_SN: Tensor, supervised_SN: Tensor) -> tuple[Tensor, Tensor]:
    """Chains at risk and chains surviving at each draft position [S], [S].

    A chain is at risk at step i while every earlier draft matched; where its answer ended it is censored: it leaves
    both counts and is not a miss (Kaplan and Meier 1958).
    """
    joint_SN = match_SN.long().cumprod(0).bool()
    before_SN = torch.cat([torch.ones_like(joint_SN[:1]), joint_SN[:-1]])
    at_risk_SN = before_SN & supervised_SN
    return at_risk_SN.sum(1), (at_risk_SN & match_SN).sum(1)


def tau_from_counts(at_risk_S: Tensor, survived_S: Tensor) -> float:
    """1 + sum_k prod_{j<=k} survived_j / at_risk_j; a position nobody reached adds nothing."""
    rates_S = survived_S.double() / at_risk_S.double().clamp(min=1)
    return 1.0 + float(rates_S.cumprod(0).sum())


def simulated_tau(match_SN: Tensor, supervised_SN: Tensor) -> float:
    """Tokens a round of a greedy chain of S drafts, from joint prefix survival (never from marginals).

    match[i, n]: the draft's arg-max at step i of slot n is the row's own next token; False where the teacher's arg-max
    left the kept vocabulary. supervised: data_prep.supervision, nested in i.
    """
    return tau_from_counts(*survival(match_SN, supervised_SN))


class Slots(NamedTuple):
    """The supervised slots of all unroll steps, n of them, in the order of the positions that teach them.

    A step without any has one that does not count: a slot of the step before, or slot 0.
    """

    asking: list[Asking]  # of each step
    index_n: Tensor  # into the packed row
    step_n: Tensor
    row_n: Tensor  # which document
    teacher_n: Tensor  # where the teaching position's state is in final_mH
    next_n: Tensor  # the row's own token at x[p+2+i]
    counted_n: Tensor
    order_n: Tensor  # where the slot stands among those of all steps end to end
    teacher_on_host: np.ndarray  # DDP would send a tensor to the GPU, which is then waited for to read it


def select(ids_T: Tensor, supervised_ST: Tensor, place_T: Tensor, documents: Documents) -> Slots:
    """All on the host, by numpy, whose indexing is several times as fast there; `place` tells for a position that
    teaches where its state is."""
    marked_ST, (steps, T) = supervised_ST.numpy(), supervised_ST.shape
    wanted_ST, sets = marked_ST.copy(), list[np.ndarray]()
    for i, marked_T in enumerate(marked_ST):
        found = np.flatnonzero(marked_T)
        sets.append(found if len(found) else (sets[-1][:1] if sets else np.zeros(1, np.int64)))
        wanted_ST[i, sets[-1]] = True
    taught_US = np.zeros((T + steps, steps), bool)  # by the position that teaches; some of those added may lie behind T
    for i, wanted_T in enumerate(wanted_ST):
        taught_US[1 + i : 1 + i + T, i] = wanted_T
    position, step = np.nonzero(taught_US)
    index = position - 1 - step
    flat = step * T + index
    teacher = place_T.clamp(min=0).numpy().take(position, mode="clip")
    following = np.append(ids_T.numpy(), -1).take(position + 1, mode="clip")
    order, counted = wanted_ST.cumsum().take(flat) - 1, marked_ST.take(flat)
    row = documents.which_T.numpy().take(index)
    together = torch.from_numpy(np.stack((index, step, row, teacher, following, counted, order)))
    of_slots, of_steps, of_rows, taught, said, counts, there = sent(together, documents.device)
    asking = Asking.nested([torch.from_numpy(slots) for slots in sets], documents)
    return Slots(asking, of_slots, of_steps, of_rows, taught, said, counts.bool(), there, teacher)


class Inputs(NamedTuple):
    """A micro-batch with what the frozen target says about it."""

    ids_T: Tensor
    documents: Documents
    supervised_ST: Tensor
    taps_TC: Tensor
    final_mH: Tensor  # final normed states of the positions that teach
    best_m: Tensor  # draft id of the teacher's arg-max; -1 where it is not kept
    lse_m: Tensor  # log-sum-exp of the teacher's logits over the full vocabulary
    slots: Slots


class Objective(nn.Module):
    """What the loop asks of a drafter family: it trains `drafter`, and its forward is what a backend wraps."""

    drafter: nn.Module
    vocab: VocabMap | None = None  # of the drafter; a checkpoint holds it

    def prepare(self, batch: Batch) -> Any:
        """No-gradient work on a micro-batch, done for the whole optimiser step before its first backward."""
        raise NotImplementedError

    def ahead(self, packs: Sequence[Pack]) -> None:
        """The packs of the optimiser step after the one that was prepared, for what can be read ahead of it."""

    def arrive(self, packs: Sequence[Pack]) -> None:
        """Wait for what the disk has of these packs, which are prepared next: that is no time of the target's."""

    def counts(self, inputs: Any) -> Tensor:
        """How many slots each loss term averages over; the loop sums it over micro-batches and ranks."""
        raise NotImplementedError

    def metrics(self, sums: Tensor) -> dict[str, Any]:
        """Metric sums, as forward returns them and the loop adds them up, in words and figures."""
        raise NotImplementedError

    def arithmetic(self, sums: Tensor, tokens: int, pairs: int) -> Arithmetic:
        """What work the metric sums stand for; `pairs` as in train.batches.Usage."""
        raise NotImplementedError


class UnrollLoss(Objective):
    """EAGLE-3's training-time test over one micro-batch."""

    drafter: Eagle3
    vocab: VocabMap

    def __init__(
        self, drafter: Eagle3, target: Target, vocab: VocabMap, eagle: EagleConfig, bf16: bool = False,
        keep_bytes: int = 0, recompute: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.drafter, self.target, self.bf16, self.recompute = drafter, target, bf16, recompute
        self.steps, self.per_row = eagle.unroll_steps, eagle.normaliser == "per_row"
        self.weights_S = torch.tensor(step_weights(self.steps, eagle.step_decay), device=target.device)
        self.loss = Loss(eagle.objective, eagle.lk_scale, eagle.lk_decay)
        self.teacher = Teacher(target, keep_bytes)
        self.vocab = vocab.to(target.device)
        self.kept_ids = None if vocab.full else self.vocab.kept_ids

    @torch.no_grad()
    def prepare(self, batch: Batch) -> Inputs:
        """Which slots count is read off the answer marks on the host, so that nothing on a GPU waits for it."""
        documents = Documents(batch.lengths, self.target.device)
        ids_T, supervised_ST = batch.ids_T, supervised(batch.answer_T, self.steps)
        teaches_T = teaching(batch.answer_T)
        if not teaches_T.any():
            teaches_T[0] = True
        slots = select(ids_T, supervised_ST, teaches_T.cumsum(0) - 1, documents)
        said = self.teacher.features(batch, teaches_T, documents)
        ids_T, supervised_ST = (sent(t, documents.device) for t in (ids_T, supervised_ST))
        best_m = self.vocab.to_draft(said.best_m)
        return Inputs(ids_T, documents, supervised_ST, said.taps_TC, said.final_mH, best_m, said.lse_m, slots)

    def ahead(self, packs: Sequence[Pack]) -> None:
        self.teacher.ahead(packs)

    def arrive(self, packs: Sequence[Pack]) -> None:
        self.teacher.arrive(packs)

    def counts(self, inputs: Inputs) -> Tensor:
        """By step: slots in the loss, or rows that have any."""
        if not self.per_row:
            return self._by_step(inputs, self._kept(inputs).long())
        return (self._kept_by_row(inputs) > 0).sum(1)

    @staticmethod
    def _kept(x: Inputs) -> Tensor:
        """Slots in the loss [n]: supervised, and the teacher's arg-max is in the kept vocabulary."""
        return (x.best_m[x.slots.teacher_n] >= 0) & x.slots.counted_n

    def _kept_by_row(self, x: Inputs) -> Tensor:
        """[S, rows]."""
        rows = len(x.documents.lengths)
        found = torch.zeros(self.steps * rows, dtype=torch.int64, device=x.ids_T.device)
        return found.index_add_(0, x.slots.step_n * rows + x.slots.row_n, self._kept(x).long()).view(self.steps, rows)

    def _by_step(self, x: Inputs, value_n: Tensor) -> Tensor:
        """[S]."""
        return value_n.new_zeros(self.steps).index_add_(0, x.slots.step_n, value_n)

    def _scale(self, x: Inputs, counts_S: Tensor) -> Tensor:
        """What each slot weighs in the optimiser step's loss [n]."""
        scale_n = (self.weights_S / counts_S.clamp(min=1))[x.slots.step_n] * self._kept(x)
        if self.per_row:
            scale_n = scale_n / self._kept_by_row(x)[x.slots.step_n, x.slots.row_n].clamp(min=1)
        return scale_n

    def forward(self, x: Inputs, counts_S: Tensor) -> tuple[Tensor, Tensor]:
        """This micro-batch's share of the optimiser step's loss, whose means divide by `counts`; metric sums [7, S].

        A micro-batch without a slot for some step passes one slot with weight zero, so that every rank and every
        backward runs the same modules and reaches every parameter.
        """
        slots, scale_n = x.slots, self._scale(x, counts_S)
        dtype = torch.bfloat16 if self.bf16 else self.drafter.lm_head.weight.dtype
        head = None if self.kept_ids is None else self.target.head_weight[self.kept_ids]

        def teacher(rows: slice) -> Tensor:
            return self.target.logits(x.final_mH[rows], head)

        taught = Teaching(
            teacher, x.lse_m, slots.order_n, slots.teacher_n, slots.teacher_on_host, scale_n, self.loss, dtype
        )
        with torch.autocast(x.ids_T.device.type, torch.bfloat16, enabled=self.bf16):
            embed_UH = self.target.embed(F.pad(x.ids_T[1:], (0, self.steps))).to(dtype)
            states = self.drafter.unroll(
                x.taps_TC.to(dtype), embed_UH, self.steps, x.documents, slots.asking, self.recompute
            )
            total, judged = self.drafter.into_head(
                torch.cat(list(states)), lambda h, weight: fused_loss(h, weight, taught)
            )
        return total, self._sums(x, judged)

    @torch.no_grad()
    def _sums(self, x: Inputs, judged: Judged) -> Tensor:
        slots, kept_n = x.slots, self._kept(x)
        sums = torch.zeros(7, self.steps, dtype=torch.float64, device=x.ids_T.device)
        match_ST = torch.zeros_like(x.supervised_ST)
        match_ST[slots.step_n, slots.index_n] = (self._tokens(judged.guess_n) == slots.next_n) & kept_n
        sums[LOSS] = self._by_step(x, judged.loss_n.double() * kept_n)
        sums[KEPT] = self._by_step(x, kept_n.double())
        sums[CORRECT] = self._by_step(x, ((judged.guess_n == x.best_m[slots.teacher_n]) & kept_n).double())
        sums[OVERLAP] = self._by_step(x, judged.overlap_n.double() * slots.counted_n)
        sums[SUPERVISED] = x.supervised_ST.sum(1)
        sums[AT_RISK], sums[SURVIVED] = survival(match_ST, x.supervised_ST)
        return sums

    def _tokens(self, draft_ids: Tensor) -> Tensor:
        return draft_ids if self.kept_ids is None else self.kept_ids[draft_ids]

    def arithmetic(self, sums: Tensor, tokens: int, pairs: int) -> Arithmetic:
        slots = [int(n) for n in sums[SUPERVISED].tolist()]
        drafter = drafter_arithmetic(self.drafter.config, tokens, slots, pairs)
        target = target_arithmetic(self.target, tokens, slots[0], pairs) if self.teacher.computes else 0.0
        return Arithmetic(drafter, target)

    def metrics(self, sums: Tensor) -> dict[str, Any]:
        """Accuracies count a dropped slot as a miss; `coverage` is the share of first-step slots not dropped; `overlap`
        is the mean chance that a sampled draft is accepted, dropped slots among them."""
        sums = sums.double().cpu()
        supervised_S = sums[SUPERVISED].clamp(min=1)
        return {
            "acc": [round(float(a), 5) for a in sums[CORRECT] / supervised_S],
            "overlap": [round(float(a), 5) for a in sums[OVERLAP] / supervised_S],
            "simulated_tau": round(tau_from_counts(sums[AT_RISK], sums[SURVIVED]), 5),
            "coverage": round(float(sums[KEPT, 0] / supervised_S[0]), 5),
            "supervised": int(sums[SUPERVISED, 0]),
        }
