"""The product of few rows against the plain one."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from models import host
from models.linear import FEW_ROWS, linear


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 13, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize("size", [(48, 70), (41, 3), (576, 64), (7, 9)])
@pytest.mark.parametrize("biased", [False, True])
def test_it_gives_the_plain_product(rows: int, size: tuple[int, int], biased: bool) -> None:
    source = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(2, rows, size[0], generator=source)[1:], torch.randn(size[1], size[0], generator=source)
    bias = torch.randn(size[1], generator=source) if biased else None
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(linear(x, weight, bias).double(), expected, atol=1e-4, rtol=1e-5)


def test_a_token_has_the_same_values_however_many_are_beside_it() -> None:
    x, weight = torch.randn(FEW_ROWS, 576), torch.randn(100, 576)
    together = linear(x, weight)
    for rows in (1, 2, 5, 9):
        assert torch.equal(linear(x[:rows], weight), together[:rows])


def test_strided_rows_and_parts_of_a_weight() -> None:
    x, weight = torch.randn(3, 80)[:, ::2], torch.randn(90, 40)
    torch.testing.assert_close(linear(x, weight[10:50]), F.linear(x, weight[10:50]))
    torch.testing.assert_close(linear(x[:, :20], weight[:, :20]), F.linear(x[:, :20], weight[:, :20]))


def test_gradients_flow() -> None:
    x, weight = torch.randn(2, 8), torch.randn(4, 8, requires_grad=True)
    linear(x, weight).sum().backward()
    assert weight.grad is not None and torch.allclose(weight.grad, x.sum(0).expand(4, 8))


def test_without_a_compiler_it_is_the_plain_product_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    host.library.cache_clear()
    x, weight = torch.randn(2, 8), torch.randn(4, 8)
    assert torch.equal(linear(x, weight), F.linear(x, weight))
    assert "g++" in capsys.readouterr().err
    host.library.cache_clear()
