"""Training's groups of FlexDraft masks, and their attention: over the tokens up to an anchor, and over their own group.

T tokens of a packed row, R mask rows, N heads, K key-value heads, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from models.attention import Documents


@dataclass(frozen=True)
class Groups:
    """One group of `size` masks behind each anchor; the anchors of each document are positions in it."""

    documents: Documents
    anchors: Sequence[Sequence[int]]
    size: int

    @cached_property
    def positions_R(self) -> Tensor:
        """Of each mask in its own document, from 0."""
        flat = torch.tensor([a for own in self.anchors for a in own], dtype=torch.int64)
        return (flat.unsqueeze(1) + torch.arange(1, self.size + 1)).flatten().to(self.documents.device)


def attend_groups(
    q_NRD: Tensor,
    own: tuple[Tensor, Tensor],
    prefix: tuple[Tensor, Tensor],
    groups: Groups,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Masks over the tokens of their document up to their anchor, and over their own group -> [R, N*D].

    `own` are the masks' keys and values [K, R, D], `prefix` those of the tokens [1, K, T, D]. One softmax over the two
    parts: nothing of the size of masks times masks is formed.
    """
    k_KRD, v_KRD = own
    N, _, D = q_NRD.shape
    K, size = k_KRD.shape[0], groups.size
    parts, start = [], 0
    for span, anchors in zip(groups.documents.spans, groups.anchors, strict=True):
        if not len(anchors):
            continue
        rows, seen = slice(start, start + len(anchors) * size), max(anchors) + 1
        start = rows.stop
        near = slice(span.start, span.start + seen)
        q = q_NRD[:, rows].reshape(K, N // K, len(anchors), size, D)
        k, v = (t[:, rows].reshape(K, 1, len(anchors), size, D) for t in (k_KRD, v_KRD))
        k_prefix, v_prefix = (t[0, :, near].to(q.dtype) for t in prefix)
        far = _capped((q.reshape(K, -1, D) @ k_prefix.transpose(1, 2)) * scale, softcap)
        far = far.view(K, N // K, len(anchors), size, seen).masked_fill(_hidden(groups, rows, seen, window), -torch.inf)
        close = _capped(q @ k.transpose(3, 4) * scale, softcap)
        wide = torch.promote_types(q.dtype, torch.float32)
        weights = torch.cat((far, close), -1).to(wide).softmax(-1).to(q.dtype)
        out = (weights[..., :seen].reshape(K, -1, seen) @ v_prefix).view(q.shape) + weights[..., seen:] @ v
        parts.append(out.reshape(N, -1, D))
    return torch.cat(parts, 1).transpose(0, 1).flatten(1)


def _capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def _hidden(groups: Groups, rows: slice, seen: int, window: int | None) -> Tensor:
    """bool [groups, size, seen]: what a mask does not see of its document's tokens."""
    positions = groups.positions_R[rows].view(-1, groups.size, 1)
    token = torch.arange(seen, device=positions.device)
    hidden = token >= positions[:, :1]  # mask 0 stands right behind the anchor
    return hidden if window is None else hidden | (positions - token >= window)
