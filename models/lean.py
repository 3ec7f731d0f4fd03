"""The elementwise parts of a trained layer, holding for the backward as little as they can.

In half precision on a GPU a layer's products are fast and memory is what it waits for and runs out of. So norms and the
gated product keep their inputs in the dtype that these have, not in fp32, and run as one kernel each; and `remade`
lets a product forget its input where that is cheaply made again. In fp32 plain torch serves.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention import rotate as plain_rotate
from models.kernels import HEAD_SIZES

HALF = (torch.bfloat16, torch.float16)


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """In fp32 whatever the stream's dtype: under autocast the stream is half precision and the gain fp32."""
    if x.dtype not in HALF:
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), gain.shape, gain.to(wide), eps).to(x.dtype)
    out: Tensor = _Norm.apply(x, gain, eps)
    return out


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    if gate.dtype not in HALF:
        return F.silu(gate) * up
    out: Tensor = _Gated.apply(gate, up)
    return out


def rotate(x_BNTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> Tensor:
    """Rotary embedding, as models.attention.rotate."""
    B, _, _, D = x_BNTD.shape
    if not (x_BNTD.is_cuda and x_BNTD.dtype in HALF and B == 1 and D in HEAD_SIZES):
        return plain_rotate(x_BNTD, cos_BTD, sin_BTD)
    out: Tensor = _Rotated.apply(x_BNTD.squeeze(0), cos_BTD.squeeze(0), sin_BTD.squeeze(0))
    return out.unsqueeze(0)


def windows(x_UH: Tensor, rows: Sequence[slice | Tensor]) -> tuple[Tensor, ...]:
    """x[r] for each of the rows' r, none of which names a row twice. Their gradients meet in one sum, rounded once."""
    out: tuple[Tensor, ...] = _Windows.apply(x_UH, *rows)
    return out


@contextmanager
def remade(x: Tensor, make: Callable[[], Tensor], wanted: bool) -> Iterator[None]:
    """Inside, what operations would hold of `x` for their backward is dropped; `make` makes it again, once for all of
    them. Not for a recomputed part (torch.utils.checkpoint), which drops everything anyway, nor in fp32."""
    if not (wanted and x.dtype in HALF):
        yield
        return
    waiting, made = 0, None
    place, size = x.data_ptr(), x.numel()  # the closures must not hold it; its caller does until this ends

    def pack(t: Tensor) -> Any:
        nonlocal waiting
        if t.data_ptr() != place or t.numel() != size:
            return t
        waiting += 1
        return t.shape, t.stride()

    def unpack(held: Any) -> Tensor:
        nonlocal waiting, made
        if isinstance(held, Tensor):
            return held
        with torch.no_grad():
            value = make() if made is None else made
        waiting -= 1
        made = value if waiting > 0 else None
        return value.as_strided(*held)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, gain)
        ctx.eps = eps
        return _normed(x, gain, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, gain = ctx.saved_tensors
        return *_norm_gradients(grad, x, gain, ctx.eps, ctx.needs_input_grad[:2]), None


def _normed(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    if x.is_cuda:
        from models import fused_train

        return fused_train.norm(x, gain, eps)
    return F.rms_norm(x.float(), gain.shape, gain.float(), eps).to(x.dtype)


def _norm_gradients(
    grad: Tensor, x: Tensor, gain: Tensor, eps: float, wanted: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Of x and of the gain, where these are `wanted`."""
    if x.is_cuda:
        from models import fused_train

        return fused_train.norm_gradients(grad, x, gain, eps, wanted)
    wide, scaled = x.float(), grad.float() * gain.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = wide * inverse
    dx = inverse * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    dgain = (grad.float() * normed).flatten(0, -2).sum(0)
    return dx.to(x.dtype) if wanted[0] else None, dgain.to(gain.dtype) if wanted[1] else None


class _Windows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *rows: slice | Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.rows, ctx.x = rows, (x.shape, x.dtype)
        return tuple(x[r] for r in rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        (shape, dtype), there = ctx.x, [g for g in gradients if g is not None]
        if not there:
            return None, *(None for _ in ctx.rows)
        total = there[0].new_zeros(shape, dtype=torch.promote_types(dtype, torch.float32))
        for r, gradient in zip(ctx.rows, gradients, strict=True):
            if gradient is not None and isinstance(r, slice):
                total[r] += gradient
            elif gradient is not None:
                total.index_copy_(0, r, total.index_select(0, r) + gradient)  # adding in place is three times slower
        return total.to(dtype), *(None for _ in ctx.rows)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        if gate.is_cuda:
            from models import fused_train

            return fused_train.gated(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        if gate.is_cuda:
            from models import fused_train

            return fused_train.gated_gradients(grad, gate, up)
        wide = gate.float()
        share = wide.sigmoid()
        dgate = grad.float() * up.float() * share * (1 + wide * (1 - share))
        return dgate.to(gate.dtype), (grad.float() * wide * share).to(up.dtype)


class _Rotated(torch.autograd.Function):
    """The way back is the rotation by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, x_NTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        from models import fused_train

        ctx.save_for_backward(cos_TD, sin_TD)
        return fused_train.rotate(x_NTD, cos_TD, sin_TD, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        from models import fused_train

        cos_TD, sin_TD = ctx.saved_tensors
        return fused_train.rotate(grad, cos_TD, sin_TD, -1), None, None
