"""What FlexDraft learns: at anchors drawn from the answers, a group of masks predicts the tokens behind the next one.

The published method names no loss; this one is ours (after DFlash's): cross-entropy at masks 1 .. block_size - 1,
mask j weighted exp(-(j - 1) / gamma), each a mean over the whole optimiser step. Mask j of the group at anchor a
predicts x[a+1+j], which is what slot a predicts at unroll step j - 1 in EAGLE-3's training: the same slots are
supervised, and accuracy by position and simulated tau mean the same.

T tokens of a packed micro-batch, G groups, S = block_size - 1 predictions of a group, n supervised masks, m positions
that teach some mask, H hidden.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from data_prep.supervision import supervised
from models.attention import Documents, sent
from models.flex_groups import Groups
from models.flexdraft import Calibrator, FlexDraft, FlexDraftConfig
from models.packed import Keys, PackedForward
from models.target import Target
from recipes.schema import FlexConfig
from train.batches import Batch
from train.features import Keeping
from train.head_loss import Wanted, head_loss
from train.objective import Objective, step_weights, survival, tau_from_counts
from train.telemetry import Arithmetic, target_arithmetic

LOSS, SUPERVISED, CORRECT, AT_RISK, SURVIVED = range(5)  # rows of the metric sums [5, S]


class FlexInputs(NamedTuple):
    """A micro-batch with what the frozen target says about it."""

    groups: Groups
    keys: Keys
    final_mH: Tensor  # final normed states of the positions that teach
    supervised_SG: Tensor
    step_n: Tensor  # of each supervised mask, from 0: mask j is at step j - 1
    group_n: Tensor
    teacher: np.ndarray  # as train.objective.Slots has it
    teacher_n: Tensor
    next_n: Tensor
    bonus_n: Tensor  # the token that stands at its group's mask 0
    any: bool  # False: no mask is supervised, and the one that is there counts for nothing
    hidden_nH: Tensor | None = None  # final normed states of the supervised masks, where these are frozen


class Learning(NamedTuple):
    """How a run learns, besides its target."""

    cfg: FlexConfig
    seed: int = 0
    bf16: bool = False
    keep_bytes: int = 0  # of the target's keys and states, kept over the epochs


def draw_anchors(valid: Tensor, count: int, seed: tuple[int, int, int]) -> list[int]:
    """At most `count` of the valid positions, ascending: a function of (seed, epoch, row), whatever rank asks."""
    found = valid.nonzero().squeeze(-1).numpy()
    if len(found) > count:
        found = np.sort(np.random.default_rng(seed).choice(found, count, replace=False))
    return [int(a) for a in found]


class LateTeacher:
    """The target's late keys and values, and its final normed states, of micro-batches: of a packed row at once, or of
    each document alone where they are to be kept over the epochs (first come first kept, up to `keep_bytes`).

    Alone, what is computed does not depend on neighbours, so whether it was kept changes no bit.
    """

    def __init__(self, target: Target, split: int, keep_bytes: int = 0) -> None:
        self.target, self.keeps = target, keep_bytes > 0
        self.forward = PackedForward(target, split, fills=False if self.keeps else None)  # alone, most rows are short
        self.keeping = Keeping[tuple[Keys, Tensor]](keep_bytes)  # by row

    @torch.no_grad()
    def read(self, batch: Batch, documents: Documents) -> tuple[Keys, Tensor]:
        """(keys of the packed row, states [T, H])"""
        if not self.keeps or not batch.rows:
            return self._read(batch.ids_T, documents)
        parts = [self._document(batch.ids_T[s], row) for s, row in zip(documents.spans, batch.rows, strict=True)]
        keys = {
            index: (torch.cat([k[index][0] for k, _ in parts], 2), torch.cat([k[index][1] for k, _ in parts], 2))
            for index in parts[0][0]
        }
        return keys, torch.cat([final for _, final in parts])

    def _read(self, ids_T: Tensor, documents: Documents) -> tuple[Keys, Tensor]:
        states, keys = self.forward.read(ids_T, documents)
        return keys, states.final_BTH[0]

    def _document(self, ids_T: Tensor, row: int) -> tuple[Keys, Tensor]:
        def make() -> tuple[Keys, Tensor]:
            return self._read(ids_T, Documents([len(ids_T)], self.target.device))

        def size(found: tuple[Keys, Tensor]) -> int:
            return sum(t.nbytes for pair in found[0].values() for t in pair) + found[1].nbytes

        return self.keeping.get(row, make, size)


class MaskLoss(Objective):
    """What a group of masks is asked to say in one micro-batch, whatever of it learns."""

    def __init__(self, config: FlexDraftConfig, target: Target, learning: Learning) -> None:
        super().__init__()
        self.config, self.target, self.learning = config, target, learning
        self.teacher = LateTeacher(target, config.split_layer, learning.keep_bytes)
        self.steps = config.block_size - 1
        self.weights_S = torch.tensor(step_weights(self.steps, math.exp(-1 / learning.cfg.gamma)), device=target.device)

    @torch.no_grad()
    def prepare(self, batch: Batch) -> FlexInputs:
        device = self.target.device
        documents, spoken_ST = Documents(batch.lengths, device), supervised(batch.answer_T, self.steps)
        anchors = [
            draw_anchors(spoken_ST[0, span], self.learning.cfg.anchors, (self.learning.seed, batch.epoch, row))
            for span, row in zip(documents.spans, batch.rows, strict=bool(batch.rows))
        ]
        found = any(anchors)
        if not found:  # a group that counts for nothing
            anchors = [[0]] + [[] for _ in batch.lengths[1:]]
        groups = Groups(documents, anchors, self.config.block_size)
        at_G = torch.tensor([span.start + a for span, own in zip(documents.spans, anchors, strict=True) for a in own])
        supervised_SG = spoken_ST[:, at_G]
        step_n, group_n = supervised_SG.nonzero().unbind(1) if found else (torch.zeros(1, dtype=torch.int64),) * 2
        place_n = at_G[group_n] + 1 + step_n  # of the position that teaches
        order = place_n.argsort(stable=True)
        step_n, group_n, place_n = step_n[order], group_n[order], place_n[order]
        next_n = batch.ids_T[(place_n + 1).clamp(max=len(batch.ids_T) - 1)]
        teaches_m, teacher_n = place_n.unique_consecutive(return_inverse=True)
        keys, final_TH = self.teacher.read(batch, documents)
        bonus_n = batch.ids_T[(at_G[group_n] + 1).clamp(max=len(batch.ids_T) - 1)]
        parts = (supervised_SG, step_n, group_n, teacher_n, next_n, bonus_n)
        on_SG, *moved = (sent(t, device) for t in parts)
        step_n, group_n, moved_n, next_n, bonus_n = moved
        final_mH = final_TH[sent(teaches_m, device)]
        chosen = (step_n, group_n, teacher_n.numpy(), moved_n, next_n, bonus_n)
        return FlexInputs(groups, keys, final_mH, on_SG, *chosen, found)

    def counts(self, inputs: FlexInputs) -> Tensor:
        return inputs.supervised_SG.sum(1)

    def states(self, masks: FlexDraft, x: FlexInputs) -> Tensor:
        """Final normed states of the supervised masks [n, H]."""
        states_RH = masks.groups(self.target, x.keys, x.groups)
        return states_RH.index_select(0, x.group_n * x.groups.size + 1 + x.step_n)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.target.device.type, torch.bfloat16, enabled=self.learning.bf16)

    def judged(
        self, x: FlexInputs, counts_S: Tensor, hidden_nH: Tensor, calibrator: Calibrator | None
    ) -> tuple[Tensor, Tensor]:
        """This micro-batch's share of the optimiser step's loss, whose means divide by `counts`; metric sums [5, S]."""
        device, steps = self.target.device, self.steps
        scale_S = self.weights_S / counts_S.clamp(min=1) * x.any
        soft = self.learning.cfg.loss == "soft"
        wanted = Wanted(x.final_mH, x.teacher, x.teacher_n, x.next_n, scale_S[x.step_n], soft)

        def through(*added: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return head_loss(self.target, wanted, hidden_nH, *added)

        bonus = None if calibrator is None else self.target.embed(x.bonus_n)
        found = through() if calibrator is None else calibrator(bonus, hidden_nH, through)
        loss, loss_n, guess_n = found
        hit_n = (guess_n == x.next_n) & x.any
        match_SG = torch.zeros_like(x.supervised_SG)
        match_SG[x.step_n, x.group_n] = hit_n
        sums = torch.zeros(5, steps, dtype=torch.float64, device=device)
        sums[LOSS].index_add_(0, x.step_n, loss_n.double() * x.any)
        sums[SUPERVISED] = x.supervised_SG.sum(1)
        sums[CORRECT] = match_SG.sum(1)
        sums[AT_RISK], sums[SURVIVED] = survival(match_SG, x.supervised_SG)
        return loss, sums

    def work(self, sums: Tensor, tokens: int, pairs: int, learned: int, seen: int, frozen: int) -> float:
        """Products of every group's masks in the late layers, so many times each kind: of the projections, of the
        attention (over a prefix as long as rows are on average) and of the feed-forward blocks."""
        c, target = self.config, self.target
        masks, hidden, wide = int(sums[SUPERVISED, 0]) * c.block_size, c.hidden_size, c.num_attention_heads * c.head_dim
        projections = 2 * hidden * (wide + c.num_key_value_heads * c.head_dim)
        attention = 2 * wide * (pairs / max(1, tokens) + c.block_size)
        blocks = 3 * hidden * int(target.config.intermediate_size)
        layers = c.target_layers - c.split_layer
        return 2.0 * layers * masks * (learned * projections + seen * attention + frozen * blocks)

    def metrics(self, sums: Tensor) -> dict[str, Any]:
        """Accuracies are against the row's own tokens, which at temperature 0 are the target's arg-max."""
        sums = sums.double().cpu()
        count_S = sums[SUPERVISED].clamp(min=1)
        return {
            "acc": [round(float(a), 5) for a in sums[CORRECT] / count_S],
            "loss_by_position": [round(float(a), 4) for a in sums[LOSS] / count_S],
            "simulated_tau": round(tau_from_counts(sums[AT_RISK], sums[SURVIVED]), 5),
            "supervised": int(sums[SUPERVISED].sum()),
        }


class FlexLoss(MaskLoss):
    """FlexDraft's attention tuning, alone or with its calibrator."""

    drafter: FlexDraft

    def __init__(self, drafter: FlexDraft, target: Target, learning: Learning) -> None:
        super().__init__(drafter.config, target, learning)
        self.drafter = drafter

    def forward(self, x: FlexInputs, counts_S: Tensor) -> tuple[Tensor, Tensor]:
        with self.autocast():
            return self.judged(x, counts_S, self.states(self.drafter, x), self.drafter.calibrator)

    def arithmetic(self, sums: Tensor, tokens: int, pairs: int) -> Arithmetic:
        """Learned products three times over, frozen ones twice: their weights have no gradient. What adapters and a
        calibrator multiply is too small to count."""
        predicting = int(sums[SUPERVISED].sum())
        head = 4.0 * predicting * self.config.hidden_size * self.config.vocab_size
        c = self.config
        masks = self.work(sums, tokens, pairs, 2 if c.lora_rank else 3, 3, 3 if c.inner_size else 2)
        return Arithmetic(masks + head, target_arithmetic(self.target, tokens, predicting, pairs))


class CalibratorLoss(MaskLoss):
    """The calibrator's fit: the masks are frozen, so that they run without a gradient beside the target."""

    drafter: Calibrator

    def __init__(self, masks: FlexDraft, target: Target, learning: Learning) -> None:
        super().__init__(masks.config, target, learning)
        assert masks.calibrator is not None
        self.frozen = [masks]  # in a list it is no part of this module, which a backend takes apart
        self.drafter = masks.calibrator

    @torch.no_grad()
    def prepare(self, batch: Batch) -> FlexInputs:
        x = super().prepare(batch)
        with self.autocast():
            return x._replace(hidden_nH=self.states(self.frozen[0], x), keys={})

    def forward(self, x: FlexInputs, counts_S: Tensor) -> tuple[Tensor, Tensor]:
        assert x.hidden_nH is not None
        with self.autocast():
            return self.judged(x, counts_S, x.hidden_nH, self.drafter)

    def arithmetic(self, sums: Tensor, tokens: int, pairs: int) -> Arithmetic:
        """The masks count as the target's: both run forward alone."""
        c, predicting = self.config, int(sums[SUPERVISED].sum())
        inner, outer = 2 * c.hidden_size * c.calibrator_rank, c.calibrator_rank * c.vocab_size
        own = 2.0 * predicting * (2 * inner + 3 * outer + c.hidden_size * c.vocab_size)
        late = self.work(sums, tokens, pairs, 1, 1, 1)
        return Arithmetic(own, target_arithmetic(self.target, tokens, predicting, pairs) + late)
