"""The parts of a layer that hold less for the backward, against plain autograd in fp32."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.lean import gated, remade, rms_norm, windows


@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 7, 16)])
def test_a_norm_in_half_precision_rounds_its_output_and_gradients_once(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, gain = (3 * torch.randn(shape)).bfloat16().requires_grad_(), (torch.rand(shape[-1]) + 0.5).requires_grad_()
    weight = torch.randn(shape).bfloat16()
    out = rms_norm(x, gain, 1e-5)
    wide = x.detach().float().requires_grad_()
    exact = F.rms_norm(wide, gain.shape, gain, 1e-5)
    assert out.dtype == torch.bfloat16 and torch.equal(out, exact.bfloat16())
    ours = torch.autograd.grad((out * weight).sum(), (x, gain))
    theirs = torch.autograd.grad((exact * weight.float()).sum(), (wide, gain))
    torch.testing.assert_close(ours[0].float(), theirs[0], atol=1e-4, rtol=8e-3)
    torch.testing.assert_close(ours[1], theirs[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_of_windows_that_overlap_meet_in_one_sum(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(9, 4, dtype=dtype).requires_grad_()
    rows: list[slice | Tensor] = [slice(0, 6), slice(2, 8), torch.tensor([8, 1, 3]), slice(0, 9)]
    found = windows(x, rows)
    assert all(torch.equal(part, x[r]) for part, r in zip(found, rows, strict=True))
    weights = [torch.randn_like(part) for part in found[:3]]  # of the last window nothing is asked
    ours = torch.autograd.grad(torch.stack([(p * w).sum() for p, w in zip(found, weights, strict=False)]).sum(), x)[0]
    wide = x.detach().double().requires_grad_()
    exact = torch.autograd.grad(
        torch.stack([(wide[r] * w).sum() for r, w in zip(rows, weights, strict=False)]).sum(), wide
    )[0]
    assert torch.equal(ours, exact.to(dtype)) if dtype == torch.bfloat16 else torch.allclose(ours, exact)


def test_the_gated_product_and_its_gradients() -> None:
    torch.manual_seed(0)
    gate, up = ((2 * torch.randn(40, 16)).bfloat16().requires_grad_() for _ in range(2))
    wide = [t.detach().float().requires_grad_() for t in (gate, up)]
    weight = torch.randn(40, 16).bfloat16()
    exact = F.silu(wide[0]) * wide[1]
    out = gated(gate, up)
    torch.testing.assert_close(out.float(), exact, atol=1e-4, rtol=1.6e-2)
    theirs = torch.autograd.grad((exact * weight.float()).sum(), wide)
    for one, other in zip(torch.autograd.grad((out * weight).sum(), (gate, up)), theirs, strict=True):
        torch.testing.assert_close(one.float(), other, atol=1e-3, rtol=1.6e-2)


def test_what_is_made_again_is_not_held_and_is_made_once_for_all_that_need_it() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 4, bias=False).bfloat16() for _ in range(3)]
    x = torch.randn(1, 5, 8).bfloat16().requires_grad_()
    made = []

    def double() -> Tensor:
        made.append(x.detach() * 2)
        return made[-1]

    def forward(wanted: bool) -> tuple[Tensor, weakref.ref[torch.UntypedStorage]]:
        y = x * 2
        with remade(y, double, wanted):
            out = torch.stack([layer(y) for layer in layers]).square().sum()
        return out, weakref.ref(y.untyped_storage())

    leaves = [x, *(layer.weight for layer in layers)]
    plain, held = forward(False)
    lean, dropped = forward(True)
    assert held() is not None and dropped() is None and not made
    for one, other in zip(torch.autograd.grad(lean, leaves), torch.autograd.grad(plain, leaves), strict=True):
        assert torch.equal(one, other)
    assert len(made) == 1
