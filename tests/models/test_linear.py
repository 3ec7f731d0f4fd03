"""The linear map of few rows, flipped or packed, against the plain product."""

import pytest
import torch
import torch.nn.functional as F

from models.linear import FEW_ROWS, PACKED_ROWS, linear, pack


@pytest.mark.parametrize("rows", [1, 2, FEW_ROWS, FEW_ROWS + 1, PACKED_ROWS, PACKED_ROWS + 1])
@pytest.mark.parametrize("biased", [False, True])
def test_every_way_gives_the_plain_product(rows: int, biased: bool) -> None:
    source = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(2, rows, 48, generator=source)[:1], torch.randn(70, 48, generator=source)
    bias = torch.randn(70, generator=source) if biased else None
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    for packed in (False, True):
        if packed:
            pack([weight])
        with torch.no_grad():
            torch.testing.assert_close(linear(x, weight, bias).double(), expected, atol=1e-5, rtol=1e-5)


def test_a_weight_that_changed_is_not_used_as_it_was_packed() -> None:
    x, weight = torch.ones(1, 8), torch.ones(4, 8)
    pack([weight])
    with torch.no_grad():
        assert linear(x, weight).tolist() == [[8.0] * 4]
        weight.mul_(2)
        assert linear(x, weight).tolist() == [[16.0] * 4]
        pack([weight])
        assert linear(x, weight).tolist() == [[16.0] * 4]


def test_gradients_flow_through_a_packed_weight() -> None:
    x, weight = torch.randn(2, 8), torch.randn(4, 8, requires_grad=True)
    pack([weight])
    linear(x, weight).sum().backward()
    assert weight.grad is not None and torch.allclose(weight.grad, x.sum(0).expand(4, 8))
