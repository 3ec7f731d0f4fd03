"""Attention of an unroll over a packed row: a causal part and diagonals, merged by their log-sum-exp.

Two ways to the causal part. *Runs*: the kernels take documents of any lengths end to end. *Squares*: the documents side
by side in a batch, padded to one length, by kernels that are nearly twice as fast on a Hopper GPU: long rows go so, and
documents of about one length.

N query heads, K key-value heads, D head size, T slots of the row, n slots that ask, U slots of the tails.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from models import diagonals
from models.attention import Documents, half_on_gpu, sent

LONG = 1024  # slots; kernels for a batch are planned once for each shape, which short documents would not pay for
SQUARE_COST = 0.6  # of a square's time over a run's for as many scores, forward and backward, on an H100


@dataclass(frozen=True)
class Square:
    """The first `size` slots of each of `rows` documents, those in which some slot asks."""

    rows: int
    size: int
    read_m: Tensor  # the slot of the packed row that stands at each place; any slot behind a document's end
    keys_m: Tensor  # the same, but T behind a document's end
    place_n: Tensor | None  # of the asking slots; None: they are all places in order

    @staticmethod
    def nested(
        sets: Sequence[Tensor], documents: Documents, tails: Documents, wanted: bool | None
    ) -> "list[Square | None]":
        """Of each step; all None where runs, of the `tails`, are faster, unless `wanted` says otherwise."""
        if wanted is None and documents.device.type != "cuda":
            return [None] * len(sets)
        first, lengths, T = sets[0], torch.tensor(documents.lengths), documents.total
        ends = lengths.cumsum(0)
        starts = ends - lengths
        behind = torch.searchsorted(first, ends)
        asks_d = behind > torch.searchsorted(first, starts)
        last = first[(behind - 1).clamp(min=0)]
        reach = int((last - starts + 1)[asks_d].max())
        step = max(128, 2 ** (reach.bit_length() - 5))  # few lengths: at most a sixteenth is padding
        rows, size = int(asks_d.sum()), -(-reach // step) * step
        tails_d = torch.tensor(tails.lengths)
        runs = int((tails_d * (2 * lengths - tails_d))[asks_d].sum())
        if wanted is None:
            wanted = size >= LONG and SQUARE_COST * rows * size**2 <= runs
        if not wanted:
            return [None] * len(sets)
        there = starts[asks_d, None] + torch.arange(size)
        there = sent(torch.where(there < ends[asks_d, None], there, T).flatten(), documents.device)
        read = there.clamp(max=T - 1)
        further_d = (asks_d.cumsum(0) - 1) * size - starts
        found: list[Square | None] = []
        for slots in sets:
            place = slots + further_d[documents.which_T[slots]]
            on_device = None if len(slots) == rows * size else sent(place, documents.device)
            found.append(Square(rows, size, read, there, on_device))
        return found

    def laid(self, x: Tensor) -> Tensor:
        """[N, n, ...] -> [rows, N, size, ...], zero where nobody asks."""
        spread = _spread(x, self.place_n, self.rows * self.size)
        return spread.unflatten(1, (self.rows, self.size)).transpose(0, 1)

    def taken(self, x: Tensor) -> Tensor:
        """Back."""
        flat = x.transpose(0, 1).flatten(1, 2)
        return flat if self.place_n is None else _gathered(flat, self.place_n)

    def keys(self, x_KTD: Tensor) -> Tensor:
        """[rows, K, size, D]."""
        found = x_KTD.transpose(0, 1).index_select(0, self.read_m)
        return found.unflatten(0, (self.rows, self.size)).transpose(1, 2)

    def gathered(self, x: Tensor, T: int) -> Tensor:
        """Of keys' gradients: back to [K, T, D]."""
        flat = x.transpose(1, 2).flatten(0, 1)
        return flat.new_zeros(T + 1, *flat.shape[1:]).index_copy_(0, self.keys_m, flat)[:T].transpose(0, 1)


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
    square: Square | None  # the other way to lay them out, where it is the faster one

    @staticmethod
    def nested(sets: Sequence[Tensor], documents: Documents, squares: bool | None = None) -> "list[Asking]":
        """Of each step, from its slots [n] in ascending order on the host; none is empty, and each holds the next.
        `squares` overrides which layout is taken."""
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
        place_T = torch.arange(documents.total) - back.index_select(0, documents.which_T)
        laid = Square.nested(sets, documents, tails, squares)
        for before, slots, square in zip((first, *sets), sets, laid, strict=False):
            place = there(place_T.index_select(0, slots), len(slots) == tails.total)
            index = there(slots, len(slots) == documents.total)
            rank_T.index_copy_(0, before, torch.arange(len(before)))
            kept = there(rank_T.index_select(0, slots), len(slots) == len(before))
            found.append(Asking(index, tails, place, kept, square))
        return found


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
    if q_NnD.device.type != "cpu" and not half_on_gpu(q_NnD):
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


class _CausalPlusDiagonals(torch.autograd.Function):
    """Flash attention for the causal part, elementwise diagonals, one softmax over both.

    The flash backward recomputes probabilities as exp(score - lse) and needs rowsum(dO * O). Handed the *merged* output
    and the *merged* log-sum-exp, it yields exactly the causal part's gradients of the merged softmax. Query heads that
    share a key head read it together. Slots that do not ask but lie in a tail or a square go through the kernels as
    zeros, with gradient zero.
    """

    @staticmethod
    def forward(
        ctx: Any, documents: Documents, asking: Asking | None, q: Tensor, k: Tensor, v: Tensor, *flat: Tensor
    ) -> Tensor:
        asking = Asking(None, documents, None, None, None) if asking is None else asking
        out, lse, rng = _causal_forward(q, k, v, documents, asking)
        if flat:
            out, lse = diagonals.merge(q, out, lse, diagonals.stacked(flat[::2]), diagonals.stacked(flat[1::2]))
        ctx.save_for_backward(q, k, v, out, lse, *rng, *flat)
        ctx.documents, ctx.asking, ctx.rng_count = documents, asking, len(rng)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *rest = ctx.saved_tensors
        rng, flat = rest[: ctx.rng_count], rest[ctx.rng_count :]
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        dq, dk, dv = _causal_backward([grad, q, out, lse], k, v, rng, ctx.documents, ctx.asking)
        if not flat:
            return None, None, dq, dk, dv
        keys, values = diagonals.stacked(flat[::2]), diagonals.stacked(flat[1::2])
        dq, dkeys, dvalues = diagonals.gradients(grad, q, out, lse, keys, values, dq)
        return None, None, dq, dk, dv, *(t for pair in zip(dkeys, dvalues, strict=True) for t in pair)


def _causal_forward(
    q_NnD: Tensor, k_KTD: Tensor, v_KTD: Tensor, documents: Documents, asking: Asking
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(out [N, n, D], log-sum-exp [N, n], what the backward wants besides)."""
    square, place = asking.square, asking.place_n
    if square is not None:
        out, lse, rng = _square_forward(square.laid(q_NnD), square.keys(k_KTD), square.keys(v_KTD))
        return square.taken(out), square.taken(lse), rng
    out, lse, rng = _flash_forward(_spread(q_NnD, place, asking.tails.total), k_KTD, v_KTD, asking.tails, documents)
    if place is None:
        return out, lse, rng
    return _gathered(out, place), lse.index_select(1, place), rng


def _causal_backward(
    asked: list[Tensor], k_KTD: Tensor, v_KTD: Tensor, rng: list[Tensor], documents: Documents, asking: Asking
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, in their shapes. `asked`: the output's gradient, q, output [N, n, D], their log-sum-exp."""
    square, place = asking.square, asking.place_n
    if square is not None:
        laid, T = [square.laid(t) for t in asked], documents.total
        dq, dk, dv = _square_backward(laid, square.keys(k_KTD), square.keys(v_KTD), rng)
        return square.taken(dq), square.gathered(dk, T), square.gathered(dv, T)
    spread = [_spread(t, place, asking.tails.total) for t in asked]
    dq, dk, dv = _flash_backward(spread, k_KTD, v_KTD, rng, asking.tails, documents)
    return dq if place is None else _gathered(dq, place), dk, dv


def _square_forward(q_BNLD: Tensor, k_BKLD: Tensor, v_BKLD: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """As `_flash_forward`, of a batch: out [B, N, L, D] and log-sum-exp [B, N, L]."""
    if q_BNLD.device.type == "cpu":
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return *op(q_BNLD, k_BKLD, v_BKLD, 0.0, True), []
    op = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse, _, _, _, _, seed, offset, _ = op(q_BNLD, k_BKLD, v_BKLD, None, True, 0.0, True, False)
    return out, lse.squeeze(-1), [seed, offset]


def _square_backward(
    asked: list[Tensor], k_BKLD: Tensor, v_BKLD: Tensor, rng: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    grad, q, out, lse = asked
    if q.device.type == "cpu":
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = op(grad, q, k_BKLD, v_BKLD, out, lse, 0.0, True)
    else:
        op, size = torch.ops.aten._scaled_dot_product_cudnn_attention_backward, q.shape[2]
        lse = lse.contiguous().unsqueeze(-1)
        dq, dk, dv = op(grad, q, k_BKLD, v_BKLD, out, lse, *rng, None, None, None, size, size, 0.0, True)
    return dq, dk, dv


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
