"""What is learned: the teacher, the loss of EAGLE-3's training-time test, and what is measured beside it.

Slot p sees the features of x[0..p] and the embedding of x[p+1+i] at unroll step i, and predicts x[p+2+i]; its teacher
is the target's distribution at position q = p+1+i. Sources: EAGLE-3 (arXiv 2503.01840) and its code, for the soft
cross-entropy on kept vocabulary; the normaliser (mean over the whole optimiser step) is ours.
B rows, T positions, H hidden, C features, V vocabulary, Vd kept vocabulary, S unroll steps, n selected slots.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from data_prep.supervision import supervised
from models.eagle3 import Eagle3
from models.target import Target
from models.vocab import VocabMap
from train.batches import Batch

CHUNK = 2**25  # logits (float32) held at once where a pass over a vocabulary is cut into chunks of rows

# rows of the metric sums [6, S], each additive over micro-batches, ranks and optimiser steps
LOSS, KEPT, SUPERVISED, CORRECT, AT_RISK, SURVIVED = range(6)


def shift_left(x_BT: Tensor, by: int, fill: int) -> Tensor:
    """out[b, p] = x[b, p + by], `fill` past the end."""
    if by >= x_BT.shape[1]:
        return torch.full_like(x_BT, fill)
    return torch.cat([x_BT[:, by:], torch.full_like(x_BT[:, :by], fill)], dim=1)


def teacher_best(target: Target, final_nH: Tensor) -> Tensor:
    """The target's arg-max over its full vocabulary [n], a chunk of rows at a time: [n, V] never exists."""
    rows = max(1, CHUNK // target.vocab_size)
    return torch.cat([target.logits(part).argmax(-1) for part in final_nH.split(rows)])


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

    index_n: Tensor  # into the flattened [B, T]
    teacher_n: Tensor  # where the teaching position's state is in final_mH
    next_n: Tensor  # the row's own token at x[p+2+i]
    any: bool


class Inputs(NamedTuple):
    """A micro-batch with what the frozen target says about it; m positions teach some slot."""

    ids_BT: Tensor
    supervised_SBT: Tensor
    taps_BTC: Tensor
    final_mH: Tensor  # final normed states of the positions that teach
    best_m: Tensor  # draft id of the teacher's arg-max; -1 where it is not kept
    slots: list[Slots]


class Objective(nn.Module):
    """What the loop asks of a drafter family: it trains `drafter`, and its forward is what a backend wraps."""

    drafter: nn.Module

    def prepare(self, batch: Batch) -> Any:
        """No-gradient work on a micro-batch, done for the whole optimiser step before its first backward."""
        raise NotImplementedError

    def counts(self, inputs: Any) -> Tensor:
        """How many slots each loss term averages over; the loop sums it over micro-batches and ranks."""
        raise NotImplementedError

    def metrics(self, sums: Tensor) -> dict[str, Any]:
        """Metric sums, as forward returns them and the loop adds them up, in words and figures."""
        raise NotImplementedError


class UnrollLoss(Objective):
    """EAGLE-3's training-time test over one micro-batch."""

    drafter: Eagle3

    def __init__(
        self, drafter: Eagle3, target: Target, vocab: VocabMap, steps: int, decay: float, bf16: bool = False
    ) -> None:
        super().__init__()
        self.drafter = drafter
        self.target, self.steps, self.decay, self.bf16 = target, steps, decay, bf16
        self.vocab = vocab.to(target.device)
        self.kept_ids = None if vocab.full else self.vocab.kept_ids

    @torch.no_grad()
    def prepare(self, batch: Batch) -> Inputs:
        """Which slots count is read off the answer marks on the host, so that nothing on a GPU waits for it."""
        ids_BT, answer_BT = batch
        device, supervised_SBT = self.target.device, supervised(answer_BT, self.steps)
        teaches_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
        for i, supervised_BT in enumerate(supervised_SBT):
            teaches_BT[:, 1 + i :] |= supervised_BT[:, : max(0, ids_BT.shape[1] - 1 - i)]
        teaching = teaches_BT.flatten().nonzero().squeeze(-1)
        place_BT = torch.zeros_like(ids_BT)
        place_BT.view(-1)[teaching] = torch.arange(len(teaching))
        slots = []
        for i, supervised_BT in enumerate(supervised_SBT):
            found = supervised_BT.flatten().nonzero().squeeze(-1)
            index = found if len(found) else found.new_zeros(1)
            teacher = shift_left(place_BT, 1 + i, 0).view(-1)[index]
            following = shift_left(ids_BT, 2 + i, -1).view(-1)[index]
            index, teacher, following = (t.to(device, non_blocking=True) for t in (index, teacher, following))
            slots.append(Slots(index, teacher, following, len(found) > 0))
        ids_BT = ids_BT.to(device, non_blocking=True)
        states = self.target.features(ids_BT)
        teaching = (teaching if len(teaching) else teaching.new_zeros(1)).to(device, non_blocking=True)
        final_mH = states.final_BTH.flatten(0, 1)[teaching]
        best_m = self.vocab.to_draft(teacher_best(self.target, final_mH))
        return Inputs(ids_BT, supervised_SBT.to(device), states.taps_BTC, final_mH, best_m, slots)

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
        B, T = x.ids_BT.shape
        sums = torch.zeros(6, self.steps, dtype=torch.float64, device=x.ids_BT.device)
        match_SN = torch.zeros(self.steps, B * T, dtype=torch.bool, device=x.ids_BT.device)
        loss = torch.zeros((), device=x.ids_BT.device)
        with torch.autocast(x.ids_BT.device.type, torch.bfloat16, enabled=self.bf16):
            with torch.no_grad():
                teacher_mV = self.target.logits(x.final_mH, self.kept_ids)
            weights = step_weights(self.steps, self.decay)
            hidden = self.drafter.unroll(x.taps_BTC.float(), lambda i: self._embed(x.ids_BT, 1 + i), self.steps)
            for i, hidden_BTH in enumerate(hidden):
                slots = x.slots[i]
                kept_n = self._kept(x, slots)
                logits_nV = self.drafter.logits(hidden_BTH.flatten(0, 1).index_select(0, slots.index_n))
                loss_n, guess_n = soft_cross_entropy(logits_nV, teacher_mV, slots.teacher_n)
                total = (loss_n * kept_n).sum()
                loss = loss + weights[i] * total / counts_S[i].clamp(min=1)
                match_SN[i, slots.index_n] = (self._tokens(guess_n) == slots.next_n) & kept_n
                sums[CORRECT, i] = ((guess_n == x.best_m[slots.teacher_n]) & kept_n).sum()
                sums[LOSS, i] = total.detach()
                sums[KEPT, i] = kept_n.sum()
        sums[SUPERVISED] = x.supervised_SBT.sum((1, 2))
        sums[AT_RISK], sums[SURVIVED] = survival(match_SN, x.supervised_SBT.flatten(1))
        return loss, sums

    def _embed(self, ids_BT: Tensor, by: int) -> Tensor:
        return self.target.embed(shift_left(ids_BT, by, 0)).float()

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
