"""A linear map that is also fast for the few rows that decoding on a CPU multiplies."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import host

FEW_ROWS = 48  # up to here the compiled product is at least as fast (docs/lab-notebook.md)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, [..., in] -> [..., out].

    On a CPU in fp32, torch multiplies one row at half the speed at which memory delivers the weights, and a few rows
    slower still; `models.host` takes about as long for eight rows as for one.
    """
    few = x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32 and x.numel() <= FEW_ROWS * x.shape[-1]
    learns = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if not few or learns or not weight.is_contiguous() or host.library() is None:
        return F.linear(x, weight, bias)
    out = host.product(x.contiguous(), weight)
    return out if bias is None else out.add_(bias)


class Linear(nn.Linear):
    """nn.Linear by way of `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)
