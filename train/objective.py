"""What is learned: the teacher, the loss of EAGLE-3's training-time test, and what is measured beside it.

Slot p sees the features of x[0..p] and the embedding of x[p+1+i] at unroll step i, and predicts x[p+2+i]; its teacher
is the target's distribution at position q = p+1+i. Sources: EAGLE-3 (arXiv 2503.01840) and its code, for the soft
cross-entropy on kept vocabulary; the normaliser (mean over the whole optimiser step) is ours.
T tokens of a packed micro-batch, H hidden, C features, V vocabulary, Vd kept vocabulary, S unroll steps, n selected
slots, m positions that teach some slot.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from data_prep.supervision import supervised
from models.attention import Documents
from models.eagle3 import Eagle3
from models.target import Target
from models.vocab import VocabMap
from train.batches import Batch, Pack
from train.features import CHUNK, Teacher

# rows of the metric sums [6, S], each additive over micro-batches, ranks and optimiser steps
LOSS, KEPT, SUPERVISED, CORRECT, AT_RISK, SURVIVED = range(6)


def shift_left(x_T: Tensor, by: int, fill: int) -> Tensor:
    """out[p] = x[p + by], `fill` past the end. In a packed row this reads across documents, but never for a slot that
    is supervised: such a slot predicts x[p + 2 + i] of its own answer and is fed nothing behind it."""
    return torch.cat([x_T[by:], x_T.new_full((min(by, len(x_T)),), fill)])


class _SoftCrossEntropy(torch.autograd.Function):
    """-sum_v p_v log q_v and its gradient q - p in one pass: one [n, Vd] tensor is kept for backward."""

    @staticmethod
    def forward(ctx: Any, logits_nV: Tensor, teacher_mV: Tensor, rows_n: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(logits_nV.dtype, torch.float32)
        loss_n = torch.empty(len(logits_nV), dtype=wide, device=logits_nV.device)
        guess_n = torch.empty(len(logits_nV), dtype=torch.int64, device=logits_nV.device)
        gradient_nV = torch.empty_like(logits_nV)
        size = max(1, CHUNK // logits_nV.shape[1])
        for start in range(0, len(logits_nV), size):
            part = slice(start, start + size)
            log_q = logits_nV[part].to(wide).log_softmax(-1)
            p = teacher_mV[rows_n[part]].to(wide).softmax(-1)
            loss_n[part] = -(p * log_q).sum(-1)
            guess_n[part] = log_q.argmax(-1)
            gradient_nV[part] = log_q.exp_().sub_(p)
        ctx.save_for_backward(gradient_nV)
        ctx.mark_non_differentiable(guess_n)
        return loss_n, guess_n

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient_nV,) = ctx.saved_tensors
        return gradient_nV * gradients[0].to(gradient_nV.dtype).unsqueeze(-1), None, None


def soft_cross_entropy(logits_nV: Tensor, teacher_mV: Tensor, rows_n: Tensor) -> tuple[Tensor, Tensor]:
    """Per slot the cross-entropy against softmax(teacher[rows]) [n], and the draft's own arg-max [n]."""
    loss_n, guess_n = _SoftCrossEntropy.apply(logits_nV, teacher_mV, rows_n)
    return loss_n, guess_n


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
    """The supervised slots of one unroll step, n of them (one, slot 0, where there is none: then `any` is False)."""

    index_n: Tensor  # into the packed row
    teacher_n: Tensor  # where the teaching position's state is in final_mH
    next_n: Tensor  # the row's own token at x[p+2+i]
    any: bool


class Inputs(NamedTuple):
    """A micro-batch with what the frozen target says about it."""

    ids_T: Tensor
    documents: Documents
    supervised_ST: Tensor
    taps_TC: Tensor
    final_mH: Tensor  # final normed states of the positions that teach
    best_m: Tensor  # draft id of the teacher's arg-max; -1 where it is not kept
    slots: list[Slots]


class Objective(nn.Module):
    """What the loop asks of a drafter family: it trains `drafter`, and its forward is what a backend wraps."""

    drafter: nn.Module
    vocab: VocabMap | None = None  # of the drafter; a checkpoint holds it

    def prepare(self, batch: Batch) -> Any:
        """No-gradient work on a micro-batch, done for the whole optimiser step before its first backward."""
        raise NotImplementedError

    def ahead(self, packs: Sequence[Pack]) -> None:
        """The packs of the optimiser step after the one that was prepared, for what can be read ahead of it."""

    def counts(self, inputs: Any) -> Tensor:
        """How many slots each loss term averages over; the loop sums it over micro-batches and ranks."""
        raise NotImplementedError

    def metrics(self, sums: Tensor) -> dict[str, Any]:
        """Metric sums, as forward returns them and the loop adds them up, in words and figures."""
        raise NotImplementedError


class UnrollLoss(Objective):
    """EAGLE-3's training-time test over one micro-batch."""

    drafter: Eagle3
    vocab: VocabMap

    def __init__(
        self,
        drafter: Eagle3,
        target: Target,
        vocab: VocabMap,
        steps: int,
        decay: float,
        bf16: bool = False,
        keep_bytes: int = 0,
    ) -> None:
        super().__init__()
        self.drafter = drafter
        self.target, self.steps, self.decay, self.bf16 = target, steps, decay, bf16
        self.teacher = Teacher(target, keep_bytes)
        self.vocab = vocab.to(target.device)
        self.kept_ids = None if vocab.full else self.vocab.kept_ids

    @torch.no_grad()
    def prepare(self, batch: Batch) -> Inputs:
        """Which slots count is read off the answer marks on the host, so that nothing on a GPU waits for it."""
        ids_T, answer_T, lengths, _ = batch
        device, supervised_ST = self.target.device, supervised(answer_T, self.steps)
        teaches_T = torch.zeros_like(ids_T, dtype=torch.bool)
        for i, supervised_T in enumerate(supervised_ST):
            teaches_T[1 + i :] |= supervised_T[: max(0, len(ids_T) - 1 - i)]
        if not teaches_T.any():
            teaches_T[0] = True
        place_T = teaches_T.cumsum(0) - 1
        slots = []
        for i, supervised_T in enumerate(supervised_ST):
            found = supervised_T.nonzero().squeeze(-1)
            index = found if len(found) else found.new_zeros(1)
            teacher = shift_left(place_T, 1 + i, 0)[index].clamp(min=0)
            following = shift_left(ids_T, 2 + i, -1)[index]
            index, teacher, following = (t.to(device, non_blocking=True) for t in (index, teacher, following))
            slots.append(Slots(index, teacher, following, len(found) > 0))
        documents = Documents(lengths, device)
        taps_TC, final_mH, best_m, _ = self.teacher.features(batch, teaches_T, documents)
        ids_T, supervised_ST = (t.to(device, non_blocking=True) for t in (ids_T, supervised_ST))
        return Inputs(ids_T, documents, supervised_ST, taps_TC, final_mH, self.vocab.to_draft(best_m), slots)

    def ahead(self, packs: Sequence[Pack]) -> None:
        self.teacher.ahead(packs)

    def counts(self, inputs: Inputs) -> Tensor:
        return torch.stack([self._kept(inputs, slots).sum() for slots in inputs.slots])

    @staticmethod
    def _kept(x: Inputs, slots: Slots) -> Tensor:
        """Slots in the loss [n]: supervised, and the teacher's arg-max is in the kept vocabulary."""
        return (x.best_m[slots.teacher_n] >= 0) & slots.any

    def forward(self, x: Inputs, counts_S: Tensor) -> tuple[Tensor, Tensor]:
        """This micro-batch's share of the optimiser step's loss, whose means divide by `counts`; metric sums [6, S].

        A micro-batch without a slot for some step passes one slot with weight zero, so that every rank and every
        backward runs the same modules and reaches every parameter.
        """
        device = x.ids_T.device
        sums = torch.zeros(6, self.steps, dtype=torch.float64, device=device)
        match_ST = torch.zeros_like(x.supervised_ST)
        loss = torch.zeros((), device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=self.bf16):
            with torch.no_grad():
                teacher_mV = self.target.logits(x.final_mH, self.kept_ids)
            weights = step_weights(self.steps, self.decay)
            taps_TC = x.taps_TC.float()
            hidden = self.drafter.unroll(taps_TC, lambda i: self._embed(x.ids_T, 1 + i), self.steps, x.documents)
            for i, hidden_TH in enumerate(hidden):
                slots = x.slots[i]
                kept_n = self._kept(x, slots)
                logits_nV = self.drafter.logits(hidden_TH.index_select(0, slots.index_n))
                loss_n, guess_n = soft_cross_entropy(logits_nV, teacher_mV, slots.teacher_n)
                total = (loss_n * kept_n).sum()
                loss = loss + weights[i] * total / counts_S[i].clamp(min=1)
                match_ST[i, slots.index_n] = (self._tokens(guess_n) == slots.next_n) & kept_n
                sums[CORRECT, i] = ((guess_n == x.best_m[slots.teacher_n]) & kept_n).sum()
                sums[LOSS, i] = total.detach()
                sums[KEPT, i] = kept_n.sum()
        sums[SUPERVISED] = x.supervised_ST.sum(1)
        sums[AT_RISK], sums[SURVIVED] = survival(match_ST, x.supervised_ST)
        return loss, sums

    def _embed(self, ids_T: Tensor, by: int) -> Tensor:
        return self.target.embed(shift_left(ids_T, by, 0)).float()

    def _tokens(self, draft_ids: Tensor) -> Tensor:
        return draft_ids if self.kept_ids is None else self.kept_ids[draft_ids]

    def metrics(self, sums: Tensor) -> dict[str, Any]:
        """Accuracies count a dropped slot as a miss; `coverage` is the share of first-step slots not dropped."""
        sums = sums.double().cpu()
        supervised_S = sums[SUPERVISED].clamp(min=1)
        return {
            "acc": [round(float(a), 5) for a in sums[CORRECT] / supervised_S],
            "simulated_tau": round(tau_from_counts(sums[AT_RISK], sums[SURVIVED]), 5),
            "coverage": round(float(sums[KEPT, 0] / supervised_S[0]), 5),
            "supervised": int(sums[SUPERVISED, 0]),
        }
