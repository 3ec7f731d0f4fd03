"""Attention over cached keys, and inside the documents of a packed row.

B batch, T query positions, S key slots, N heads, K key-value heads, G = N / K, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


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


@dataclass(frozen=True)
class Documents:
    """How the T tokens of a packed row divide into documents, end to end and none of them empty."""

    lengths: Sequence[int]
    device: torch.device

    @cached_property
    def spans(self) -> list[slice]:
        return [slice(a, b) for a, b in pairwise(accumulate(self.lengths, initial=0))]

    @cached_property
    def longest(self) -> int:
        return max(self.lengths)

    @cached_property
    def total(self) -> int:
        return sum(self.lengths)

    @cached_property
    def offsets(self) -> Tensor:
        """Where each document starts, and T: int32 [documents + 1], as flash attention takes it."""
        return sent(torch.tensor(list(accumulate(self.lengths, initial=0)), dtype=torch.int32), self.device)

    @cached_property
    def positions_T(self) -> Tensor:
        """Of each token in its own document, from 0."""
        return sent(torch.cat([torch.arange(n) for n in self.lengths]), self.device)

    @cached_property
    def which_T(self) -> Tensor:
        """Which document each token is in; on the host."""
        return torch.arange(len(self.lengths)).repeat_interleave(torch.tensor(self.lengths))


def sent(x: Tensor, device: torch.device) -> Tensor:
    """The host's tensor on the device. A GPU takes it when its turn comes: the host goes on at once, which it would
    not with memory that is not page-locked."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


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


def attend_documents(
    q_1NTD: Tensor,
    k_1KTD: Tensor,
    v_1KTD: Tensor,
    documents: Documents,
    window: int | None,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention inside each document of a packed row -> [1, T, N*D]; no gradients.

    With a `window` a token sees itself and the window - 1 tokens before it.
    """
    if softcap is None and half_on_gpu(q_1NTD):
        q, k, v = (t[0].transpose(0, 1) for t in (q_1NTD, k_1KTD, v_1KTD))
        ends, most, left = documents.offsets, documents.longest, -1 if window is None else window - 1
        out, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, ends, ends, most, most, 0.0, True, False, scale=scale, window_size_left=left, window_size_right=0
        )
        return out.flatten(1).unsqueeze(0)
    parts = []
    for span, length in zip(documents.spans, documents.lengths, strict=True):
        mask = None
        if window is not None and window < length:
            mask = torch.ones(1, length, length, dtype=torch.bool, device=q_1NTD.device).tril().triu(1 - window)
        parts.append(attend(q_1NTD[:, :, span], k_1KTD[:, :, span], v_1KTD[:, :, span], mask, scale, softcap))
    return torch.cat(parts, 1)


def half_on_gpu(q: Tensor) -> bool:
    """Whether a GPU's flash attention takes this dtype."""
    return q.device.type == "cuda" and q.dtype in (torch.bfloat16, torch.float16)
