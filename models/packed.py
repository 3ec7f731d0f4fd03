"""The frozen target over packed rows, one after the other, with the keys and values of its last layers.

A small target's forward is some four hundred kernels, which a GPU runs in less time than a host needs to launch them.
So it is recorded for a few sizes, and rows are filled up to one: with a document of padding, and with empty ones.

T tokens, L layers whose keys are kept, K key-value heads, D head size.
"""

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from models.attention import Documents, half_on_gpu, sent
from models.capture import Steps
from models.target import States, Target

Keys = dict[int, tuple[Tensor, Tensor]]  # of a late layer, the target's keys and values [1, K, T, D]

SMALL = 1 << 24  # weights of a layer, below which its launches take longer than its products
FILL = 1024  # a size's tokens are a multiple of it, and its longest document at least as long
SIZES = 16  # recorded at most; rows of other sizes run as they are


@dataclass(frozen=True)
class _Place:
    """What a recorded forward reads, and where it leaves its keys and values [2, L, K, T, D]."""

    ids_T: Tensor
    documents: Documents
    kept: Tensor


class PackedForward:
    """`Target.packed_features`, and the keys and values of the layers from `split` on (None: of none). `fills` is
    whether rows are filled up: where it pays, by default."""

    def __init__(self, target: Target, split: int | None = None, fills: bool | None = None) -> None:
        self.target, self.late = target, 0 if split is None else target.n_layers - split
        self.fills = pays(target) if fills is None else fills
        self.steps, self.places = Steps(target.device), dict[Hashable, _Place]()

    @torch.no_grad()
    def read(self, ids_T: Tensor, documents: Documents) -> tuple[States, Keys]:
        """`ids` are on the host. What is returned is the caller's own."""
        T = len(ids_T)
        size = -(-T // FILL) * FILL, _power(len(documents.lengths) + 1, 64), _power(documents.longest, FILL)
        if not self.fills or (size not in self.places and len(self.places) == SIZES):
            kept = self._room(T)
            return self._run(sent(ids_T, self.target.device), documents, kept), self._keys(kept)
        place = self._fill(ids_T, documents, size)
        states = self.steps.run(size, lambda: self._run(place.ids_T, place.documents, place.kept))
        own = States(states.taps_BTC[:, :T].clone(), states.final_BTH[:, :T].clone())
        return own, self._keys(place.kept[..., :T, :].clone(memory_format=torch.contiguous_format))

    def _fill(self, ids_T: Tensor, documents: Documents, size: tuple[int, int, int]) -> _Place:
        tokens, count, longest = size
        lengths = [*documents.lengths, tokens - len(ids_T)]
        filled = Documents([*lengths, *[0] * (count - len(lengths))], documents.device)
        ids = sent(torch.cat((ids_T, ids_T.new_zeros(tokens - len(ids_T)))), self.target.device)
        if size in self.places:
            place = self.places[size]
            place.ids_T.copy_(ids)
            place.documents.offsets.copy_(filled.offsets)
            place.documents.positions_T.copy_(filled.positions_T)
            if not self.steps.captures:  # the layers look at the lengths themselves
                place = _Place(ids, filled, place.kept)
        else:
            vars(filled)["longest"] = longest  # for the number of programs: whichever rows come
            place = self.places[size] = _Place(ids, filled, self._room(tokens))
        return place

    def _room(self, tokens: int) -> Tensor:
        target = self.target
        return target.final_norm.new_empty(2, self.late, target.n_kv, tokens, target.head_dim)

    def _run(self, ids_T: Tensor, documents: Documents, kept: Tensor) -> States:
        first = self.target.n_layers - self.late

        def see(index: int, k: Tensor, v: Tensor) -> None:
            if index >= first:
                kept[0, index - first] = k[0]
                kept[1, index - first] = v[0]

        return self.target.packed_features(ids_T, documents, see)

    def _keys(self, kept: Tensor) -> Keys:
        pairs = enumerate(zip(*kept, strict=True), self.target.n_layers - self.late)
        return {index: (keys[None], values[None]) for index, (keys, values) in pairs}


def pays(target: Target) -> bool:
    """Whether a forward's launches take longer than its arithmetic, and it can be recorded."""
    if target.kernels is None or target.sharded or not half_on_gpu(target.final_norm):
        return False
    layer = target.layers[0]
    return sum(weight.numel() for weight in (layer.qkv, layer.out.weight, layer.gate_up, layer.down.weight)) < SMALL


def _power(count: int, least: int) -> int:
    """The power of two that is not below either."""
    return max(least, 1 << (count - 1).bit_length())
