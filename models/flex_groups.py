"""Training's groups of FlexDraft masks, and their attention: over the tokens up to an anchor, and over their own group.

T tokens of a packed row, R mask rows, M documents, Q masks and S tokens of the widest of them, N heads, K key-value
heads, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from models.attention import Documents, attend, sent
from models.cache import ALIGN


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
        return sent((flat.unsqueeze(1) + torch.arange(1, self.size + 1)).flatten(), self.documents.device)

    @cached_property
    def begins_G(self) -> Tensor:
        """The first token that each group sees, in the packed row."""
        found = [span.start for span, own in zip(self.documents.spans, self.anchors, strict=True) for _ in own]
        return sent(torch.tensor(found), self.documents.device)

    @cached_property
    def seen_G(self) -> Tensor:
        """How many tokens each group sees."""
        return sent(torch.tensor([a + 1 for own in self.anchors for a in own]), self.documents.device)

    @cached_property
    def padded(self) -> "Padded":
        """The documents that have groups side by side, each as wide as the widest."""
        found = [(span, own) for span, own in zip(self.documents.spans, self.anchors, strict=True) if len(own)]
        counts = torch.tensor([len(own) * self.size for _, own in found])
        seen = torch.tensor([max(own) + 1 for _, own in found])
        starts = torch.tensor([span.start for span, _ in found])
        place_Q = torch.arange(int(counts.max()))
        wide = -(-(len(place_Q) + int(seen.max())) // ALIGN) * ALIGN
        token_S = torch.arange(wide - len(place_Q))
        real_MQ = place_Q < counts.unsqueeze(1)
        row_MQ = torch.where(real_MQ, place_Q + (counts.cumsum(0) - counts).unsqueeze(1), 0)
        token_MS = torch.where(token_S < seen.unsqueeze(1), token_S + starts.unsqueeze(1), 0)
        parts = (row_MQ, token_MS, real_MQ.flatten().nonzero().squeeze(1))
        return Padded(*(sent(part, self.documents.device) for part in parts))

    def visible(self, window: int | None) -> Tensor:
        """bool [M, Q, S + Q]: the tokens and then the masks that each mask of `padded` sees."""
        if window not in self._visible:
            row_MQ, size = self.padded.row_MQ, self.size
            position = self.positions_R[row_MQ].unsqueeze(2)
            place_Q = torch.arange(row_MQ.shape[1], device=row_MQ.device)
            token_S = torch.arange(self.padded.token_MS.shape[1], device=row_MQ.device)
            anchor = position - 1 - (place_Q % size).view(1, -1, 1)
            far = token_S <= anchor
            if window is not None:
                far = far & (position - token_S < window)
            group = torch.div(place_Q, size, rounding_mode="floor")
            near = (group.unsqueeze(1) == group).expand(len(row_MQ), -1, -1)
            self._visible[window] = torch.cat((far, near), 2)
        return self._visible[window]

    @cached_property
    def _visible(self) -> dict[int | None, Tensor]:
        return {}


@dataclass(frozen=True)
class Padded:
    """Where the masks [M, Q] and the tokens before them [M, S] of M documents lie, and which of the masks, end to end,
    are not there to fill a row."""

    row_MQ: Tensor
    token_MS: Tensor
    real_R: Tensor


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
    parts: nothing of the size of masks times masks is formed. On a GPU all documents go at once, by a kernel where it
    serves.
    """
    if q_NRD.is_cuda:
        return _on_gpu(q_NRD, own, prefix, groups, scale, softcap, window)
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


def _on_gpu(
    q: Tensor, own: tuple[Tensor, Tensor], prefix: tuple[Tensor, Tensor], groups: Groups, scale: float,
    softcap: float | None, window: int | None,
) -> Tensor:  # fmt: skip
    from models import fused_groups

    if softcap is not None or not fused_groups.serves(q, len(own[0]), groups.size):
        return attend_padded(q, own, prefix, groups, scale, softcap, window)
    near, far = (own[0].to(q.dtype), own[1].to(q.dtype)), (prefix[0][0].to(q.dtype), prefix[1][0].to(q.dtype))
    return fused_groups.attend(q, near, far, groups.begins_G, groups.seen_G, groups.size, scale, window)


def attend_padded(
    q_NRD: Tensor,
    own: tuple[Tensor, Tensor],
    prefix: tuple[Tensor, Tensor],
    groups: Groups,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
) -> Tensor:
    """`attend_groups` by one attention over all documents, side by side. A place that fills a row is its first mask's
    copy, whose output is left out."""
    at = groups.padded
    q = _side_by_side(q_NRD, at.row_MQ)
    k, v = (
        torch.cat((_side_by_side(far[0], at.token_MS).to(near.dtype), _side_by_side(near, at.row_MQ)), 2)
        for far, near in zip(prefix, own, strict=True)
    )
    out_MQX = attend(q, k, v, groups.visible(window), scale, softcap)
    return out_MQX.flatten(0, 1).index_select(0, at.real_R)


def _side_by_side(x_NRD: Tensor, index_MQ: Tensor) -> Tensor:
    """[M, N, Q, D]"""
    return x_NRD.index_select(1, index_MQ.flatten()).unflatten(1, index_MQ.shape).transpose(0, 1)


def _capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def _hidden(groups: Groups, rows: slice, seen: int, window: int | None) -> Tensor:
    """bool [groups, size, seen]: what a mask does not see of its document's tokens."""
    positions = groups.positions_R[rows].view(-1, groups.size, 1)
    token = torch.arange(seen, device=positions.device)
    hidden = token >= positions[:, :1]  # mask 0 stands right behind the anchor
    return hidden if window is None else hidden | (positions - token >= window)
