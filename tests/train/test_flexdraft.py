"""FlexDraft's training: the loss against a mask-by-mask reference, anchors, and the entry point on a tiny target."""

import math

import pytest
import torch
from torch import Tensor

from data_prep.rows import Rows
from models.flexdraft import FlexDraft, FlexDraftConfig
from models.target import Target
from recipes.schema import FlexConfig
from tests.train import tiny_run
from train import head_loss
from train.batches import load_batch
from train.flex_objective import CalibratorLoss, FlexLoss, Learning, draw_anchors

SIZE = 4


def objective(
    target: Target, kind: str = "soft", anchors: int = 3, keep_bytes: int = 0, calibrator: int = 0, lora_rank: int = 0
) -> FlexLoss:
    torch.manual_seed(0)
    drafter = FlexDraft(FlexDraftConfig.from_target(target, 3, SIZE, calibrator, lora_rank))
    drafter.init_from_target(target, [torch.arange(20)])
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    cfg = FlexConfig(layers=3, block_size=SIZE, anchors=anchors, gamma=2.0, loss=kind)
    return FlexLoss(drafter, target, Learning(cfg, keep_bytes=keep_bytes))


def naive(loss: FlexLoss, rows: Rows, indices: list[int]) -> tuple[Tensor, list[float]]:
    """Row by row, anchor by anchor, each group alone behind its prefix as decoding runs it: (loss, accuracy)."""
    target, drafter, steps = loss.target, loss.drafter, SIZE - 1
    terms: list[list[Tensor]] = [[] for _ in range(steps)]
    right = [0] * steps
    for r in indices:
        ids, answer = rows.row(r)
        answer[0] = 0
        found = [a for a in range(len(ids) - 2) if answer[a + 1] == answer[a + 2] != 0]
        valid = torch.tensor([a in found for a in range(len(ids))])
        teacher = target.logits(target.features(ids.unsqueeze(0)).final_BTH[0])
        for anchor in draw_anchors(valid, loss.learning.cfg.anchors, (0, 0, r)):
            cache = target.new_cache(1, 128)
            target.prefill(ids[None, : anchor + 1], [anchor + 1], cache)
            logits = drafter.logits(target, drafter.block(target, cache), ids[anchor + 1, None])[0]
            for j in range(1, SIZE):
                if anchor + 1 + j >= len(ids) or len(set(answer[anchor + 1 : anchor + 2 + j].tolist())) != 1:
                    break
                log_q, following = logits[j].log_softmax(-1), ids[anchor + 1 + j]
                p = teacher[anchor + j].softmax(-1)
                terms[j - 1].append(-(p * log_q).sum() if loss.learning.cfg.loss == "soft" else -log_q[following])
                right[j - 1] += int(log_q.argmax() == following)
    weights = [math.exp(-j / 2.0) for j in range(steps)]
    means = [w / sum(weights) * torch.stack(t).mean() for w, t in zip(weights, terms, strict=True)]
    return torch.stack(means).sum(), [n / len(t) for n, t in zip(right, terms, strict=True)]


@pytest.mark.parametrize(("kind", "calibrator"), [("soft", 0), ("hard", 0), ("soft", 6)])
def test_the_loss_is_that_of_each_group_alone_however_rows_are_packed(
    target: Target, kind: str, calibrator: int
) -> None:
    loss, rows = objective(target, kind, calibrator=calibrator), tiny_run.rows()
    wanted, accuracy = naive(loss, rows, [0, 3, 7, 9])
    for parts in ([[0, 3, 7, 9]], [[9, 0], [], [7, 3]]):
        inputs = [loss.prepare(load_batch(rows, part)) for part in parts]
        counts = torch.stack([loss.counts(x) for x in inputs]).sum(0)
        found = [loss(x, counts) for x in inputs]
        total = sum(float(one.detach()) for one, _ in found)
        assert total == pytest.approx(float(wanted.detach()), rel=1e-5)
        figures = loss.metrics(torch.stack([sums for _, sums in found]).sum(0))
        assert figures["acc"] == pytest.approx(accuracy, abs=1e-4) and figures["simulated_tau"] >= 1


@pytest.mark.parametrize("calibrator", [0, 6])
def test_the_gradient_is_that_of_plain_cross_entropy(
    target: Target, calibrator: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_loss, "CHUNK", 320 * 3)  # three slots at a time
    loss = objective(target, calibrator=calibrator)
    x = loss.prepare(load_batch(tiny_run.rows(), [3, 5]))
    counts = loss.counts(x)
    loss(x, counts)[0].backward()
    found = {name: p.grad.clone() for name, p in loss.drafter.named_parameters() if p.grad is not None}
    loss.zero_grad()
    hidden = loss.drafter.groups(target, x.keys, x.groups)[x.group_n * SIZE + 1 + x.step_n]
    p = target.logits(x.final_mH).softmax(-1)[x.teacher_n]
    logits = loss.drafter.logits(target, hidden.unsqueeze(1), x.bonus_n).squeeze(1)
    terms = -(p * logits.log_softmax(-1)).sum(-1)
    (terms * (loss.weights_S / counts)[x.step_n]).sum().backward()
    assert len(found) == 1 + 4 * 3 + (4 if calibrator else 0)
    for name, parameter in loss.drafter.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-6, rtol=1e-4)


def test_a_calibrator_alone_has_the_loss_and_gradient_of_one_that_learns_with_the_masks(target: Target) -> None:
    """Its masks run without a gradient, when micro-batches are prepared."""
    both = objective(target, calibrator=6)
    alone = CalibratorLoss(both.drafter, target, both.learning)
    batch, found = load_batch(tiny_run.rows(), [3, 5]), []
    for loss in (both, alone):
        loss.zero_grad()
        x = loss.prepare(batch)
        value, sums = loss(x, loss.counts(x))
        value.backward()
        calibrator = both.drafter.calibrator
        assert calibrator is not None
        gradients = [p.grad.clone() for p in calibrator.parameters() if p.grad is not None]
        found.append((value.detach(), sums, gradients))
    torch.testing.assert_close(found[0], found[1])
    assert len(found[1][2]) == 4 == len([*alone.parameters()])


def test_anchors_have_two_supervised_tokens_behind_them_and_change_with_the_epoch(target: Target) -> None:
    loss, rows = objective(target, anchors=4), tiny_run.rows()
    drawn = []
    for epoch in range(3):
        x = loss.prepare(load_batch(rows, [5, 3, 7], epoch))
        alone = loss.prepare(load_batch(rows, [3], epoch))
        assert x.groups.anchors[1] == alone.groups.anchors[0]  # whatever it is packed with
        for row, anchors in zip([5, 3, 7], x.groups.anchors, strict=True):
            answer = rows.row(row)[1]
            assert len(anchors) == 4 and sorted(set(anchors)) == anchors
            assert all(answer[a + 1] == answer[a + 2] != 0 for a in anchors)
        drawn.append(x.groups.anchors)
    assert drawn[0] != drawn[1] != drawn[2]


def test_what_is_kept_over_the_epochs_changes_no_bit(target: Target) -> None:
    rows, keeping, short = tiny_run.rows(), objective(target, keep_bytes=2**30), objective(target, keep_bytes=1)
    for part in ([3, 5], [5, 3, 7], [7]):
        one, other = (loss.prepare(load_batch(rows, part)) for loss in (keeping, short))
        assert torch.equal(one.final_mH, other.final_mH)
        assert all(torch.equal(a, b) for i in one.keys for a, b in zip(one.keys[i], other.keys[i], strict=True))
    assert len(keeping.teacher.keeping.kept) == 3 and not short.teacher.keeping.kept
