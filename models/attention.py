"""Attention over cached keys, and the unroll's causal part plus diagonals.

B batch, T query positions, S key slots, N heads, K key-value heads, G = N / K, D head size.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def fusable(device: torch.device, head_dim: int) -> bool:
    """Whether the decoding kernels of `models.fused` run there, for heads of this size."""
    return device.type == "cuda" and head_dim in (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Heads:
    """A layer's N query heads and K key-value heads of size D, with the gains of their norms where it has any."""

    queries: int
    keys: int
    size: int
    scale: float
    eps: float = 0.0
    q_gain: Tensor | None = None
    k_gain: Tensor | None = None


def rotate(x_BNTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> Tensor:
    """Rotary embedding, half-split layout (RoFormer as in Llama checkpoints)."""
    low, high = x_BNTD.chunk(2, dim=-1)
    return x_BNTD * cos_BTD.unsqueeze(1) + torch.cat((-high, low), dim=-1) * sin_BTD.unsqueeze(1)


def attend(
    q_BNTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask_BTS: Tensor | None, scale: float, softcap: float | None = None
) -> Tensor:
    """Masked attention -> [B, T, N*D]. `mask` None means causal with T == S.

    The G query heads that share a key head are folded into the query axis, so keys are never repeated.
    """
    B, N, T, D = q_BNTD.shape
    K = k_BKSD.shape[1]
    if mask_BTS is None and softcap is None:
        out = F.scaled_dot_product_attention(q_BNTD, k_BKSD, v_BKSD, is_causal=True, scale=scale, enable_gqa=N != K)
        return out.transpose(1, 2).reshape(B, T, N * D)
    if mask_BTS is None:
        mask_BTS = torch.ones(T, T, dtype=torch.bool, device=q_BNTD.device).tril().expand(B, T, T)
    q = q_BNTD.reshape(B, K, (N // K) * T, D)
    mask = mask_BTS.repeat(1, N // K, 1).unsqueeze(1)
    if softcap is None:
        out = F.scaled_dot_product_attention(q, k_BKSD, v_BKSD, attn_mask=mask, scale=scale)
    else:
        scores = softcap * torch.tanh(q @ k_BKSD.transpose(2, 3) * (scale / softcap))
        out = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).float().softmax(-1).to(q.dtype) @ v_BKSD
    return out.reshape(B, N, T, D).transpose(1, 2).reshape(B, T, N * D)


def causal_plus_diagonals(
    q_BNTD: Tensor, k_BNTD: Tensor, v_BNTD: Tensor, diagonals: list[tuple[Tensor, Tensor]]
) -> Tensor:
    """Attention of one unroll step -> [B, N, T, D]; `diagonals` holds (key, value) of each later step, [B, N, T, D].

    Query p sees the step-0 keys 0..p and, of every later step, the key at its own slot p alone. The two parts are
    merged by their log-sum-exp, so nothing of size [T, T] is stored.
    """
    if _flash(q_BNTD) is None:
        return reference_causal_plus_diagonals(q_BNTD, k_BNTD, v_BNTD, diagonals)
    # the flash kernels trust the last stride to be 1 and compute nonsense where it is not
    q_BNTD, k_BNTD, v_BNTD = (t if t.stride(-1) == 1 else t.contiguous() for t in (q_BNTD, k_BNTD, v_BNTD))
    flat = [t for pair in diagonals for t in pair]
    out: Tensor = _CausalPlusDiagonals.apply(q_BNTD, k_BNTD, v_BNTD, *flat)
    return out


def reference_causal_plus_diagonals(
    q_BNTD: Tensor, k_BNTD: Tensor, v_BNTD: Tensor, diagonals: list[tuple[Tensor, Tensor]]
) -> Tensor:
    """The same in the obvious way, [T, T] scores and all: for tests and for dtypes that no flash kernel takes."""
    T, scale = q_BNTD.shape[2], q_BNTD.shape[3] ** -0.5
    hidden = torch.ones(T, T, dtype=torch.bool, device=q_BNTD.device).triu(1)
    scores = [(q_BNTD @ k_BNTD.transpose(2, 3) * scale).masked_fill(hidden, float("-inf"))]
    scores += [(q_BNTD * k).sum(-1, keepdim=True) * scale for k, _ in diagonals]
    weights = torch.cat(scores, -1).softmax(-1)
    out = weights[..., :T] @ v_BNTD
    for i, (_, v) in enumerate(diagonals):
        out = out + weights[..., T + i, None] * v
    return out


def _flash(q: Tensor) -> str | None:
    if q.device.type == "cpu":
        return "cpu"
    return "cuda" if q.dtype in (torch.bfloat16, torch.float16) else None


class _CausalPlusDiagonals(torch.autograd.Function):
    """Flash attention for the causal part, elementwise diagonals, one softmax over both.

    The flash backward recomputes probabilities as exp(score - lse) and needs rowsum(dO * O). Handed the *merged* output
    and the *merged* log-sum-exp, it yields exactly the causal part's gradients of the merged softmax.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *flat: Tensor) -> Tensor:
        scale, wide = q.shape[-1] ** -0.5, torch.promote_types(q.dtype, torch.float32)
        rng: tuple[Tensor, ...] = ()
        if q.device.type == "cpu":
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        else:
            out, lse, _, _, _, _, seed, offset, _ = torch.ops.aten._scaled_dot_product_flash_attention(
                q, k, v, 0.0, True
            )
            rng = (seed, offset)
        if flat:
            keys, values = torch.stack(flat[::2]), torch.stack(flat[1::2])  # [i, B, N, T, D]
            scores = (q.to(wide) * keys).sum(-1) * scale
            total = torch.logaddexp(lse.to(wide), scores.logsumexp(0))
            own = ((scores - total).exp().unsqueeze(-1) * values).sum(0)
            out = (out * (lse - total).exp().unsqueeze(-1) + own).to(q.dtype)
            lse = total.to(lse.dtype)
        ctx.save_for_backward(q, k, v, out, lse, *rng, *flat)
        ctx.rng_count = len(rng)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        q, k, v, out, lse, *rest = ctx.saved_tensors
        rng, flat = rest[: ctx.rng_count], rest[ctx.rng_count :]
        grad = grad.contiguous()
        T, scale, wide = q.shape[2], q.shape[-1] ** -0.5, torch.promote_types(q.dtype, torch.float32)
        if q.device.type == "cpu":
            dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, q, k, v, out, lse, 0.0, True
            )
        else:
            dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
                grad, q, k, v, out, lse, None, None, T, T, 0.0, True, *rng
            )
        if not flat:
            return dq, dk, dv
        keys, values = torch.stack(flat[::2]), torch.stack(flat[1::2])
        wide_q, wide_grad = q.to(wide), grad.to(wide)
        weight = ((wide_q * keys).sum(-1) * scale - lse).exp()
        dscore = weight * ((wide_grad * values).sum(-1) - (wide_grad * out).sum(-1)) * scale
        dq = (dq + (dscore.unsqueeze(-1) * keys).sum(0)).to(q.dtype)
        dkeys, dvalues = (dscore.unsqueeze(-1) * wide_q).to(q.dtype), (weight.unsqueeze(-1) * wide_grad).to(q.dtype)
        return dq, dk, dv, *(t for pair in zip(dkeys, dvalues, strict=True) for t in pair)
