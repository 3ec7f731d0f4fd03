"""Losses and their gradients against autograd of the obvious formulas."""

import pytest
import torch
from torch import Tensor

from recipes.schema import OBJECTIVES
from tests.train.test_objective import slot_loss
from train.fused_loss import Teaching, fused_loss
from train.losses import Loss, judge

KEPT = torch.tensor([0, 2, 3, 5, 6, 8, 9])  # of a vocabulary of 11
ROWS, ORDER = torch.tensor([0, 0, 1, 2, 2]), torch.tensor([3, 0, 4, 1, 2])


def obvious(loss: Loss, logits_nV: Tensor, teacher_cV: Tensor) -> tuple[Tensor, Tensor]:
    """Of each slot, by the full teacher: (loss, overlap)."""
    found = [slot_loss(loss, z, teacher_cV[int(row)], KEPT) for z, row in zip(logits_nV, ROWS, strict=True)]
    return torch.stack([value for value, _ in found]), torch.stack([overlap for _, overlap in found])


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("sharpness", [0.3, 1.0, 6.0])
def test_every_objective_and_its_gradient_are_those_of_autograd(name: str, sharpness: float) -> None:
    torch.manual_seed(0)
    loss, scale_n = Loss(name, 0.8, 1.7), torch.rand(5, dtype=torch.float64)
    teacher = sharpness * torch.randn(3, 11, dtype=torch.float64)
    logits = (sharpness * torch.randn(5, 7, dtype=torch.float64)).requires_grad_()
    value, overlap = obvious(loss, logits, teacher)
    (wanted,) = torch.autograd.grad((value * scale_n).sum(), logits)
    gradient = logits.detach().clone()
    found = judge(gradient, teacher[:, KEPT], ROWS, teacher.logsumexp(-1), scale_n, loss)
    torch.testing.assert_close(found.loss_n, value)
    torch.testing.assert_close(found.overlap_n, overlap)
    torch.testing.assert_close(gradient, wanted)
    assert torch.equal(found.guess_n, logits.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_head_and_loss_in_one_pass_give_the_gradients_of_two(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over chunks that end inside a teacher's row; what stands behind the loss scales them."""
    monkeypatch.setattr("train.fused_loss.CHUNK_CPU", 2 * len(KEPT))
    torch.manual_seed(1)
    x, head = (torch.randn(n, 4, dtype=torch.float64, requires_grad=True) for n in (5, len(KEPT)))
    teacher, scale_n = torch.randn(3, 11, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
    loss, asked = Loss(name), []

    def rows(part: slice) -> Tensor:
        asked.append(part)
        return teacher[part][:, KEPT].to(dtype)

    teaching = Teaching(rows, teacher.logsumexp(-1), ORDER, ROWS, ROWS.numpy(), scale_n, loss, dtype)
    total, _ = fused_loss(x, head, teaching)
    value, _ = obvious(loss, x[ORDER] @ head.T, teacher)
    expected = (value * scale_n).sum()
    atol, rtol = (1e-9, 1e-7) if dtype == torch.float64 else (0.05, 0.05)
    torch.testing.assert_close(total, expected, atol=atol, rtol=rtol)
    for one, other in zip(
        torch.autograd.grad(total * 3, (x, head)), torch.autograd.grad(expected * 3, (x, head)), strict=True
    ):
        torch.testing.assert_close(one, other, atol=atol, rtol=rtol)
    assert asked == [slice(0, 1), slice(1, 3), slice(2, 3)]


def test_a_second_backward_is_refused() -> None:
    x, head = torch.randn(2, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    rows = torch.zeros(2, dtype=torch.long)
    teaching = Teaching(
        lambda part: torch.randn(1, 3),
        torch.ones(1),
        torch.arange(2),
        rows,
        rows.numpy(),
        torch.ones(2),
        Loss(),
        torch.float32,
    )
    total, _ = fused_loss(x, head, teaching)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward once"):
        total.backward()
