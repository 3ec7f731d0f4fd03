"""A frozen target cut over the processes of a run, so that one larger than a card can teach.

Each rank keeps 1/world of the matrices of every decoder layer and of the embedding and the head. A layer is gathered
when it is reached, the next one meanwhile; each takes the place of the layer before the last. The embedding and the
head take turns in a place of their own. So a rank holds 1/world of the target, two layers and one table; norms and
biases are small and whole everywhere. No gradients flow here, which is why a few lines do what ZeRO-3 needs hooks for.

A gather is a collective: all ranks must read the same weights in the same order. Training does, since every rank runs
as many micro-batches. What one process does alone (answers for the data, validation, the final evaluation) the others
serve: `led` runs it on the main process, which says what it is about to gather.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor

from models.target import Target, load_target
from models.target_weights import Affine, Layer
from recipes.schema import TargetConfig

T = TypeVar("T")
ALIGN = 64  # elements at which a matrix begins
DONE = -1


class Place:
    """Memory that one unit at a time is gathered into."""

    def __init__(self, size: int, like: Tensor) -> None:
        self.flat, self.unit = like.new_empty(size), DONE
        self.pending: Any = None

    def wait(self) -> None:
        """On a GPU it is the stream that waits, not the host."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None


class Layers(Sequence[Layer]):
    """The decoder layers of a `Shards`."""

    def __init__(self, shards: "Shards", bare: list[Layer]) -> None:
        self.shards, self.bare = shards, bare

    def __len__(self) -> int:
        return len(self.bare)

    @overload
    def __getitem__(self, index: int) -> Layer: ...
    @overload
    def __getitem__(self, index: slice) -> list[Layer]: ...
    def __getitem__(self, index: int | slice) -> Layer | list[Layer]:
        if isinstance(index, slice):
            raise TypeError("layers of a sharded target are read one by one")
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        qkv, out, gate_up, down = self.shards.read(index)
        if index + 1 < len(self):
            self.shards.fetch(index + 1)
        bare = self.bare[index]
        out_map, down_map = Affine(out, bare.out.bias), Affine(down, bare.down.bias)
        return replace(bare, qkv=qkv, out=out_map, gate_up=gate_up, down=down_map)


class Shards:
    """This rank's part of the weights of a target, cut when made; units are the layers, then the tables."""

    def __init__(self, target: Target, device: torch.device) -> None:
        self.world, self.rank, self.device = dist.get_world_size(), dist.get_rank(), device
        self.leads = False
        whole, count = target.weights, len(target.layers)
        self.shapes: list[list[torch.Size]] = []
        self.parts: list[Tensor] = []
        for layer in whole.layers:
            self._cut([layer.qkv, layer.out.weight, layer.gate_up, layer.down.weight])
        self._cut([whole.embedding.data])
        self.embedding_unit = self.head_unit = count
        if whole.head.data_ptr() != whole.embedding.data_ptr():
            self._cut([whole.head.data])
            self.head_unit += 1
        sizes = [self.world * len(part) for part in self.parts]
        like = self.parts[0]
        places = [Place(max(sizes[:count]), like) for _ in range(2)]
        self.places = [places[i % 2] for i in range(count)] + [Place(max(sizes[count:]), like)] * (len(sizes) - count)
        self.layers = Layers(self, [_bare(layer, device) for layer in whole.layers])

    def _cut(self, matrices: list[Tensor]) -> None:
        starts = _starts([m.shape for m in matrices])
        size = -(-starts[-1] // self.world)
        part = matrices[0].new_zeros(size)
        first = self.rank * size
        for start, matrix in zip(starts, matrices, strict=False):
            flat = matrix.reshape(-1)
            low, high = max(first, start), min(first + size, start + len(flat))
            if low < high:
                part[low - first : high - first] = flat[low - start : high - start]
        self.shapes.append([m.shape for m in matrices])
        self.parts.append(part.to(self.device))

    @property
    def embedding(self) -> Tensor:
        return self.read(self.embedding_unit)[0]

    @property
    def head(self) -> Tensor:
        return self.read(self.head_unit)[0]

    def read(self, unit: int) -> list[Tensor]:
        """The unit's matrices, whole; they are overwritten when another unit takes their place."""
        self.fetch(unit)
        place, shapes = self.places[unit], self.shapes[unit]
        place.wait()
        starts = _starts(shapes)
        return [
            place.flat[start : start + shape.numel()].view(shape) for start, shape in zip(starts, shapes, strict=False)
        ]

    def fetch(self, unit: int) -> None:
        """Begin to gather a unit, unless it is in its place already."""
        place = self.places[unit]
        if place.unit == unit:
            return
        if self.leads:
            self._tell(unit)
        place.wait()
        into = place.flat[: self.world * len(self.parts[unit])]
        place.pending = dist.all_gather_into_tensor(into, self.parts[unit], async_op=True)
        place.unit = unit

    def _tell(self, unit: int) -> int:
        told = torch.tensor(unit, device=self.device)
        dist.broadcast(told, 0)
        return int(told)

    def lead(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 while the others `follow`."""
        self.leads = True
        try:
            return work()
        finally:
            self.leads = False
            self._tell(DONE)

    def follow(self) -> None:
        while (unit := self._tell(DONE)) != DONE:
            self.fetch(unit)


def _starts(shapes: list[torch.Size]) -> list[int]:
    """Where each matrix begins in the flat unit, and the unit's end."""
    starts = [0]
    for shape in shapes:
        starts.append(starts[-1] + -(-shape.numel() // ALIGN) * ALIGN)
    return starts


def _bare(layer: Layer, device: torch.device) -> Layer:
    """A layer without its matrices, all else on the device."""

    def there(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(device)

    none, norms = layer.qkv.new_empty(0), {name: gain.to(device) for name, gain in layer.norms.items()}
    out, down = Affine(none, there(layer.out.bias)), Affine(none, there(layer.down.bias))
    return replace(layer, qkv=none, qkv_bias=there(layer.qkv_bias), out=out, gate_up=none, down=down, norms=norms)


def shard(target: Target, device: torch.device) -> Target:
    """Cut a whole target that is on the CPU; nothing of it stays there."""
    target.weights = Shards(target, device)
    target.release(device)
    return target


def load_sharded(cfg: TargetConfig, device: torch.device, dtype: torch.dtype, turn: int, turns: int) -> Target:
    """Load and cut, one process of a machine after the other (`turn` of `turns`), so that its memory holds one whole
    target at a time, and no GPU ever does."""
    loaded: Target | None = None
    for number in range(turns):
        if number == turn:
            loaded = shard(load_target(cfg, "cpu", dtype), device)
        dist.barrier()
    assert loaded is not None, "every process has its turn"
    return loaded


def led(target: Target, main: bool, work: Callable[[], T]) -> T | None:
    """Run `work`, which reads the target, on the main process alone; None on the others, which see to it that a
    sharded target can be read there."""
    if not isinstance(target.weights, Shards):
        return work() if main else None
    if main:
        return target.weights.lead(work)
    target.weights.follow()
    return None
