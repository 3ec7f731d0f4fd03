"""A static key-value cache with a length of its own for each row."""

import copy

import torch
from torch import Tensor

ALIGN = 16


class KVCache:
    """Keys and values [B, K, capacity, D] a layer. Slots below a row's length are committed; new tokens are written
    from there on and count only once `advance`, `keep` or `set_lengths` says so.

    `host` mirrors the lengths on the host, so that attention reads only the slots that can matter without a sync.
    With `bucket` set, attention reads that many slots whatever the lengths, and writes go by index: what a captured
    step needs, since lengths move under it.
    """

    def __init__(
        self, layers: int, rows: int, heads: int, capacity: int, head_dim: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        capacity = -(-capacity // ALIGN) * ALIGN
        shape = (layers, rows, heads, capacity, head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self.rows, self.capacity = rows, capacity
        self.host = [0] * rows
        self.bucket = 0
        self._row_index = torch.arange(rows, device=device)

    def set_lengths(self, lengths: list[int]) -> None:
        self.lengths.copy_(torch.tensor(lengths, pin_memory=self.lengths.is_cuda), non_blocking=True)
        self.host = list(lengths)

    @property
    def high(self) -> int:
        return max(self.host)

    @property
    def uniform(self) -> bool:
        """Every row has the same length, so writes are slices and not scatters."""
        return not self.bucket and len(set(self.host)) == 1

    def part(self, rows: slice) -> "KVCache":
        """Consecutive rows, emptied, as a cache of its own in the same memory. Lengths that it sets are set here too;
        `host` here must be told."""
        part = copy.copy(self)
        part.keys, part.values, part.lengths = self.keys[:, rows], self.values[:, rows], self.lengths[rows]
        part.rows, part.bucket = len(part.lengths), 0
        part._row_index = self._row_index[: part.rows]
        part.set_lengths([0] * part.rows)
        return part

    def adopt(self, rows: list[int], other: "KVCache") -> None:
        """Take over the committed slots of another cache of the same model, its rows in order, into `rows` here."""
        index = torch.tensor(rows, device=self.lengths.device)
        used = other.high
        self.keys[:, index, :, :used] = other.keys[:, :, :, :used]
        self.values[:, index, :, :used] = other.values[:, :, :, :used]
        self.lengths[index] = other.lengths
        for row, length in zip(rows, other.host, strict=True):
            self.host[row] = length

    def span(self, new: int) -> int:
        """Slots that attention reads when `new` tokens follow: a multiple of ALIGN, since masks of other widths send a
        GPU's attention down a path many times slower."""
        return min(self.capacity, self.bucket or -(-(self.high + new) // ALIGN) * ALIGN)

    def write(self, layer: int, k_BKTD: Tensor, v_BKTD: Tensor, offset: int = 0) -> tuple[Tensor, Tensor]:
        """Store keys and values behind the committed ones, `offset` slots further on when uncommitted ones are already
        there; return what attention must read [B, K, S, D]."""
        T = k_BKTD.shape[2]
        keys, values = self.keys[layer], self.values[layer]
        if self.uniform:
            start = self.high + offset
            keys[:, :, start : start + T] = k_BKTD
            values[:, :, start : start + T] = v_BKTD
        else:
            new = torch.arange(offset, offset + T, device=self.lengths.device)
            slots = (self.lengths.unsqueeze(1) + new).clamp(max=self.capacity - 1)
            keys[self._row_index.unsqueeze(1), :, slots] = k_BKTD.transpose(1, 2)
            values[self._row_index.unsqueeze(1), :, slots] = v_BKTD.transpose(1, 2)
        return keys[:, :, : self.span(offset + T)], values[:, :, : self.span(offset + T)]

    def visible(self, ancestors_BTU: Tensor) -> Tensor:
        """[B, T, S]: all committed slots, and among the U uncommitted tokens what `ancestors` allows."""
        B, T, U = ancestors_BTU.shape
        slot = torch.arange(self.span(U), device=self.lengths.device)
        behind = slot - self.lengths.unsqueeze(1)  # [B, S]: index among the uncommitted tokens where >= 0
        inside = (behind >= 0) & (behind < U)
        new = ancestors_BTU.gather(2, behind.clamp(0, U - 1).unsqueeze(1).expand(B, T, -1))
        return (behind < 0).unsqueeze(1) | (new & inside.unsqueeze(1))

    def positions(self, new_BT: Tensor) -> Tensor:
        """[B, S]: the position of each slot, given those of the new tokens."""
        T = new_BT.shape[1]
        slot = torch.arange(self.span(T), device=self.lengths.device)
        behind = slot - self.lengths.unsqueeze(1)
        return torch.where(behind < 0, slot, new_BT.gather(1, behind.clamp(0, T - 1)))

    def keep(self, counts_B: Tensor, counts: list[int] | None, path_BD: Tensor | None = None) -> None:
        """Commit some of the tokens just written: the first `counts` of each row, or of the indices in `path`.

        Without `counts` the host is told later, by `note`."""
        if path_BD is not None and self.bucket and path_BD.is_cuda:
            from models import fused

            fused.keep(self.keys, self.values, self.lengths, path_BD)
        elif path_BD is not None:
            source = (self.lengths.unsqueeze(1) + path_BD).clamp(max=self.capacity - 1)
            into = self.lengths.unsqueeze(1) + torch.arange(path_BD.shape[1], device=source.device)
            rows, into = self._row_index.unsqueeze(1), into.clamp(max=self.capacity - 1)
            for tensor in (self.keys, self.values):
                tensor[:, rows, :, into] = tensor[:, rows, :, source]
        self.lengths += counts_B
        if counts is not None:
            self.note(counts)

    def note(self, counts: list[int]) -> None:
        """Tell the host how many tokens each row committed."""
        self.host = [length + count for length, count in zip(self.host, counts, strict=True)]
