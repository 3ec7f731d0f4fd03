"""A linear map that is also fast for the few rows that decoding on a CPU multiplies."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW_ROWS = 6  # from here on the plain product is as fast (docs/lab-notebook.md)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, [..., in] -> [..., out].

    On a CPU in fp32, `x W^T` of 2 to 5 rows takes up to three times as long as `W x^T`, and one row alone, a
    matrix-vector product, longer than two: so few rows go the other way round, and a single one is doubled.
    """
    rows = x.numel() // x.shape[-1]
    if x.device.type != "cpu" or x.dtype != torch.float32 or rows > FEW_ROWS:
        return F.linear(x, weight, bias)
    flat = x.reshape(rows, -1)
    out = (weight @ (flat if rows > 1 else flat.repeat(2, 1)).T).T[:rows].reshape(*x.shape[:-1], -1)
    return out if bias is None else out + bias


class Linear(nn.Linear):
    """nn.Linear by way of `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)
