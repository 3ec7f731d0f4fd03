"""Attention over cached keys, inside the documents of a packed row, and the unroll's causal part plus diagonals.

B batch, T query positions, S key slots, N heads, K key-value heads, G = N / K, D head size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models import diagonals


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


@dataclass(frozen=True)
class Asking:
    """The slots of a packed row, n of them, whose queries are wanted at one step of an unroll.

    Flash attention takes runs of queries that end where their keys do: of every document its tail from the first slot
    that asks at any step (its last one where none does), U slots in all.
    """

    index_n: Tensor | None  # into the row; None: every slot asks
    tails: Documents
    place_n: Tensor | None  # into the tails; None: every slot of theirs asks
    kept_n: Tensor | None  # into the slots of the step before; None: all of those, or this is the first step

    @staticmethod
    def nested(sets: Sequence[Tensor], documents: Documents) -> "list[Asking]":
        """Of each step, from its slots [n] in ascending order on the host; none is empty, and each holds the next."""
        device, first = documents.device, sets[0]
        ends = torch.tensor(documents.lengths).cumsum(0)
        starts = ends - torch.tensor(documents.lengths)
        following = torch.cat((first, ends[-1:]))[torch.searchsorted(first, starts)]
        begins = following.minimum(ends - 1)  # where a document holds none, the next one lies behind its end
        tails = Documents((ends - begins).tolist(), device)
        back = ends - torch.tensor(tails.lengths).cumsum(0)  # how much further in the row than in the tails

        def there(index: Tensor, all_of_them: bool) -> Tensor | None:
            return None if all_of_them else sent(index, device)

        found, rank_T = [], torch.zeros(documents.total, dtype=torch.int64)
        for before, slots in zip((first, *sets), sets, strict=False):
            place = slots - back[documents.which_T[slots]]
            index = there(slots, len(slots) == documents.total)
            rank_T[before] = torch.arange(len(before))
            kept = there(rank_T[slots], len(slots) == len(before))
            found.append(Asking(index, tails, there(place, len(slots) == tails.total), kept))
        return found


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
    if softcap is None and _half_on_gpu(q_1NTD):
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


def causal_plus_diagonals(
    q_NnD: Tensor,
    k_KTD: Tensor,
    v_KTD: Tensor,
    diagonals: list[tuple[Tensor, Tensor]],
    documents: Documents,
    asking: Asking | None = None,
) -> Tensor:
    """Attention of one unroll step over a packed row -> [N, n, D]; `diagonals` holds (key, value) of each later step.

    The query of slot p sees the step-0 keys [K, T, D] of its own document up to p and, of every later step, the key
    [K, n, D] at its own slot alone. Queries are those of the slots that ask; without `asking` every slot does, n = T.
    The two parts are merged by their log-sum-exp, so nothing of size [n, T] is stored.
    """
    if q_NnD.device.type != "cpu" and not _half_on_gpu(q_NnD):
        return reference_causal_plus_diagonals(q_NnD, k_KTD, v_KTD, diagonals, documents, asking)
    # the flash kernels trust the last stride to be 1 and compute nonsense where it is not
    q_NnD, k_KTD, v_KTD = (t if t.stride(-1) == 1 else t.contiguous() for t in (q_NnD, k_KTD, v_KTD))
    flat = [t for pair in diagonals for t in pair]
    out: Tensor = _CausalPlusDiagonals.apply(documents, asking, q_NnD, k_KTD, v_KTD, *flat)
    return out


def reference_causal_plus_diagonals(
    q_NnD: Tensor,
    k_KTD: Tensor,
    v_KTD: Tensor,
    diagonals: list[tuple[Tensor, Tensor]],
    documents: Documents,
    asking: Asking | None = None,
) -> Tensor:
    """The same in the obvious way, one document at a time with all its scores: for tests, and for dtypes that no flash
    kernel takes."""
    if asking is not None and asking.index_n is not None:
        index, T = asking.index_n, documents.total
        everywhere = [tuple(_spread(t, index, T) for t in pair) for pair in diagonals]
        pairs = [(key, value) for key, value in everywhere]
        out = reference_causal_plus_diagonals(_spread(q_NnD, index, T), k_KTD, v_KTD, pairs, documents)
        return out.index_select(1, index)
    groups, scale = q_NnD.shape[0] // k_KTD.shape[0], q_NnD.shape[-1] ** -0.5
    k_NTD, v_NTD = k_KTD.repeat_interleave(groups, 0), v_KTD.repeat_interleave(groups, 0)
    wide = [(key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)) for key, value in diagonals]
    parts = []
    for span, length in zip(documents.spans, documents.lengths, strict=True):
        q, k, v = q_NnD[:, span], k_NTD[:, span], v_NTD[:, span]
        hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        scores = [(q @ k.transpose(1, 2) * scale).masked_fill(hidden, float("-inf"))]
        scores += [(q * key[:, span]).sum(-1, keepdim=True) * scale for key, _ in wide]
        weights = torch.cat(scores, -1).softmax(-1)
        out = weights[..., :length] @ v
        for i, (_, value) in enumerate(wide):
            out = out + weights[..., length + i, None] * value[:, span]
        parts.append(out)
    return torch.cat(parts, 1)


def _spread(x: Tensor, index_n: Tensor | None, size: int) -> Tensor:
    """[N, n, ...] -> [N, size, ...], zero where no slot of the n goes."""
    if index_n is None:
        return x
    if x.dim() == 2:
        return x.new_zeros(len(x), size).index_copy(1, index_n, x)
    return x.new_zeros(size, len(x), x.shape[2]).index_copy(0, index_n, x.transpose(0, 1)).transpose(0, 1)


def _gathered(x_NUD: Tensor, index_n: Tensor) -> Tensor:
    """[N, U, D] -> [N, n, D]. A slot's heads lie side by side, as in `_spread`: so the layers beside it take them."""
    return x_NUD.transpose(0, 1).index_select(0, index_n).transpose(0, 1)


def _half_on_gpu(q: Tensor) -> bool:
    """Whether a GPU's flash attention takes this dtype."""
    return q.device.type == "cuda" and q.dtype in (torch.bfloat16, torch.float16)


class _CausalPlusDiagonals(torch.autograd.Function):
    """Flash attention for the causal part, elementwise diagonals, one softmax over both.

    The flash backward recomputes probabilities as exp(score - lse) and needs rowsum(dO * O). Handed the *merged* output
    and the *merged* log-sum-exp, it yields exactly the causal part's gradients of the merged softmax. Query heads that
    share a key head read it together. Slots of the tails that do not ask go through
    the flash kernels as zeros, with gradient zero.
    """

    @staticmethod
    def forward(
        ctx: Any, documents: Documents, asking: Asking | None, q: Tensor, k: Tensor, v: Tensor, *flat: Tensor
    ) -> Tensor:
        tails, place = (documents, None) if asking is None else (asking.tails, asking.place_n)
        out, lse, rng = _flash_forward(_spread(q, place, tails.total), k, v, tails, documents)
        if place is not None:
            out, lse = _gathered(out, place), lse.index_select(1, place)
        if flat:
            out, lse = diagonals.merge(q, out, lse, torch.stack(flat[::2]), torch.stack(flat[1::2]))
        ctx.save_for_backward(q, k, v, out, lse, *rng, *flat)
        ctx.documents, ctx.tails, ctx.place, ctx.rng_count = documents, tails, place, len(rng)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *rest = ctx.saved_tensors
        rng, flat, place = rest[: ctx.rng_count], rest[ctx.rng_count :], ctx.place
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        asked = [_spread(t, place, ctx.tails.total) for t in (grad, q, out, lse)]
        dq, dk, dv = _flash_backward(asked, k, v, rng, ctx.tails, ctx.documents)
        if place is not None:
            dq = _gathered(dq, place)
        if not flat:
            return None, None, dq, dk, dv
        keys, values = torch.stack(flat[::2]), torch.stack(flat[1::2])
        dq, dkeys, dvalues = diagonals.gradients(grad, q, out, lse, keys, values, dq)
        return None, None, dq, dk, dv, *(t for pair in zip(dkeys, dvalues, strict=True) for t in pair)


def _pieces(tails: Documents, documents: Documents) -> Iterator[tuple[slice, slice, bool]]:
    """Of each document its queries with the keys that all of them see, and with those that they see causally: what one
    CPU kernel call can do, since it aligns the first query with the first key."""
    for asked, keys, length in zip(tails.spans, documents.spans, tails.lengths, strict=True):
        if length < keys.stop - keys.start:
            yield asked, slice(keys.start, keys.stop - length), False
        yield asked, slice(keys.stop - length, keys.stop), True


def _flash_forward(
    q_NUD: Tensor, k_KTD: Tensor, v_KTD: Tensor, tails: Documents, documents: Documents
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Causal attention inside each document, of its last queries: (out [N, U, D], log-sum-exp [N, U], what the backward
    wants besides)."""
    if q_NUD.device.type == "cpu":
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        parts: list[tuple[slice, Tensor, Tensor]] = []
        for asked, keys, causal in _pieces(tails, documents):
            more, more_lse = op(q_NUD[None, :, asked], k_KTD[None, :, keys], v_KTD[None, :, keys], 0.0, causal)
            if parts and parts[-1][0] == asked:
                _, out, lse = parts.pop()
                both = torch.logaddexp(lse, more_lse)
                out = out * (lse - both).exp().unsqueeze(-1) + more * (more_lse - both).exp().unsqueeze(-1)
                more, more_lse = out.to(more.dtype), both
            parts.append((asked, more, more_lse))
        return torch.cat([out[0] for _, out, _ in parts], 1), torch.cat([lse[0] for _, _, lse in parts], 1), []
    q, k, v = (t.transpose(0, 1) for t in (q_NUD, k_KTD, v_KTD))
    out, lse, seed, offset, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, tails.offsets, documents.offsets, tails.longest, documents.longest, 0.0, True, False
    )
    return out.transpose(0, 1), lse, [seed, offset]


def _flash_backward(
    asked: list[Tensor],
    k_KTD: Tensor,
    v_KTD: Tensor,
    rng: list[Tensor],
    tails: Documents,
    documents: Documents,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, in their shapes. `asked`: the output's gradient, q, output [N, U, D], their log-sum-exp."""
    grad_NUD, q_NUD, out_NUD, lse_NU = asked
    if q_NUD.device.type == "cpu":
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = torch.zeros_like(q_NUD), torch.empty_like(k_KTD), torch.empty_like(v_KTD)
        for queries, keys, causal in _pieces(tails, documents):
            grad, q, out, lse = (t[None, :, queries] for t in asked)
            more, dk_part, dv_part = op(grad, q, k_KTD[None, :, keys], v_KTD[None, :, keys], out, lse, 0.0, causal)
            dq[:, queries] += more[0]
            dk[:, keys], dv[:, keys] = dk_part[0], dv_part[0]
        return dq, dk, dv
    grad, q, out, k, v = (t.transpose(0, 1) for t in (grad_NUD, q_NUD, out_NUD, k_KTD, v_KTD))
    ends, longest = (tails.offsets, documents.offsets), (tails.longest, documents.longest)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(grad, q, k, v, out, lse_NU, *ends, *longest, 0.0, True, *rng)
    return dq.transpose(0, 1), dk.transpose(0, 1), dv.transpose(0, 1)
