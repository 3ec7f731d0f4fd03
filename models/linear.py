"""A linear map that is also fast for the few rows that decoding on a CPU multiplies."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

FEW_ROWS = 6  # from here on the plain product is as fast as the flipped one (docs/lab-notebook.md)
PACKED_ROWS = 32  # up to here oneDNN's product with a packed weight is faster than either
PACK_LIMIT = 2 << 30  # bytes of a model's weights: packing holds them twice

_packed: WeakIdKeyDictionary = WeakIdKeyDictionary()  # weight -> (its version, the packed copy)


def pack(weights: list[Tensor]) -> None:
    """Lay weights out as oneDNN likes them, for the decoding of fp32 models on a CPU; elsewhere nothing happens.

    A verification of 8 or 16 rows then takes little longer than one of a single row, where the plain product takes
    twice as long. A weight that changes is not used packed until it is packed again.
    """
    if any(w.device.type != "cpu" or w.dtype != torch.float32 for w in weights):
        return
    if sum(w.nbytes for w in weights) > PACK_LIMIT or not torch.backends.mkldnn.is_available():
        return
    for w in weights:
        if _packed.get(w, (-1, None))[0] == w._version:
            continue
        _packed[w] = (w._version, torch.ops.mkldnn._reorder_linear_weight(w.detach(), 1))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, [..., in] -> [..., out].

    On a CPU in fp32, `x W^T` of 2 to 5 rows takes up to three times as long as `W x^T`, and one row alone, a
    matrix-vector product, longer than two: so few rows go the other way round, and a single one is doubled. Weights
    that `pack` has seen go to oneDNN instead, up to 32 rows.
    """
    rows = x.numel() // x.shape[-1]
    if x.device.type != "cpu" or x.dtype != torch.float32 or rows > PACKED_ROWS:
        return F.linear(x, weight, bias)
    version, packed = _packed.get(weight, (-1, None))
    if packed is not None and version == weight._version and not torch.is_grad_enabled():
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return out
    if rows > FEW_ROWS:
        return F.linear(x, weight, bias)
    flat = x.reshape(rows, -1)
    flipped = (weight @ (flat if rows > 1 else flat.repeat(2, 1)).T).T[:rows].reshape(*x.shape[:-1], -1)
    return flipped if bias is None else flipped + bias


class Linear(nn.Linear):
    """nn.Linear by way of `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)
