"""The target's hidden states of token rows on disk: what a store holds, how large it will be, and its reading.

A store is a folder beside the prepared data, named by the hash of all that it depends on. Its shards are whole or
absent, each for whole rows, end to end as in the rows themselves:

    states-HASH/shard-00000/states.safetensors
        ids    int32 [T]              the rows' own, compared on every read
        taps   bfloat16 or float8_e4m3fn [T, C]
        scale  float32 [T, taps]      float8 only: what a token's tap was divided by
        final  bfloat16 [m, H]        final normed states of the positions that teach some slot (supervision.teaching)
        best   int32 [m], lse float32 [m]   the target's arg-max and log-sum-exp there, of its own, unrounded states
        crc32  int64 [rows]   of each row's taps, scale, final, best and lse, compared on every read; stores that were
                              written before there was one are read without

T tokens, m teaching positions, H hidden, C = taps x H.
"""

import json
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from data_prep.rows import Rows
from data_prep.supervision import teaching
from data_prep.teacher import Features
from recipes.files import sha256_json, whole_folder
from recipes.schema import UserError

KEY = "espalier"  # in a shard's metadata: one text, since safetensors orders several at random
FORMAT = "1"  # of the shards; raise it when their content changes
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}  # of the taps, by data.states
SHARD_BYTES = 2**29  # at most, but for a row that is larger
FEWEST = 16  # shards, where there are as many rows: several processes then have something to do
HEADER = 1024  # bytes of a shard besides its tensors, about
NAMES = ("taps", "scale", "final", "best", "lse")  # of a shard's tensors, as `Stored` has them
CHECK = "crc32"
WORDS = {
    "rows": "rows (the hash of their tokens and marks)",
    "target": "target (its fingerprint)",
    "taps": "target.taps",
    "dtype": "dtype of the target's forward",
    "states": "data.states",
    "span": "rows of the shard, first and last",
    "format": "format",
}


class Stored(NamedTuple):
    """Of some rows, as they lie on disk."""

    taps_TC: Tensor
    scale_TP: Tensor | None  # P taps
    final_mH: Tensor
    best_m: Tensor
    lse_m: Tensor

    def part(self, tokens: slice, found: slice) -> "Stored":
        """Some of the tokens, and of the positions that teach."""
        scale = None if self.scale_TP is None else self.scale_TP[tokens]
        return Stored(self.taps_TC[tokens], scale, self.final_mH[found], self.best_m[found], self.lse_m[found])

    def checksum(self) -> int:
        """At several GB/s, beside the training."""
        crc = 0
        for tensor in self:
            if tensor is not None:
                crc = zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().data, crc)
        return crc

    def pinned(self) -> "Stored":
        """In memory that a GPU copies from while it computes."""
        scale = None if self.scale_TP is None else self.scale_TP.pin_memory()
        taps, final, best, lse = (t.pin_memory() for t in (self.taps_TC, self.final_mH, self.best_m, self.lse_m))
        return Stored(taps, scale, final, best, lse)

    def features(self, device: torch.device, dtype: torch.dtype) -> Features:
        """On the device, in the dtype of the target's forward."""
        taps, final, best, lse = (
            t.to(device, non_blocking=True) for t in (self.taps_TC, self.final_mH, self.best_m, self.lse_m)
        )
        if self.scale_TP is not None:
            scale_TP = self.scale_TP.to(device, non_blocking=True)
            taps = (taps.float().unflatten(1, (scale_TP.shape[1], -1)) * scale_TP.unsqueeze(-1)).flatten(1)
        return Features(taps.to(dtype), final.to(dtype), best.long(), lse)


def stored(found: Features, states: str, taps: int) -> Stored:
    """What `data.states` keeps of features, on the host."""
    taps_TC, scale_TP = found.taps_TC, None
    if states == "fp8":
        parts_TPH = taps_TC.float().unflatten(1, (taps, -1))
        scale_TP = parts_TPH.abs().amax(-1) / torch.finfo(DTYPES[states]).max
        scale_TP = scale_TP.clamp(min=torch.finfo(torch.float32).tiny)  # of zeros too
        taps_TC = (parts_TPH / scale_TP.unsqueeze(-1)).flatten(1)
    return Stored(
        taps_TC.to(DTYPES[states]).cpu(),
        None if scale_TP is None else scale_TP.cpu(),
        found.final_mH.bfloat16().cpu(),
        found.best_m.int().cpu(),
        found.lse_m.float().cpu(),
    )


def joined(parts: Sequence[Stored]) -> Stored:
    """End to end."""
    taps, scale, final, best, lse = (
        None if of_all[0] is None else torch.cat(of_all) for of_all in zip(*parts, strict=True)
    )
    assert taps is not None and final is not None and best is not None and lse is not None
    return Stored(taps, scale, final, best, lse)


def tensor_bytes(tokens: int, teaching_tokens: int, hidden: int, taps: int, states: str) -> int:
    """What rows with so many tokens take, all shards' headers left out."""
    scale = 4 * taps if states == "fp8" else 0
    return tokens * (4 + taps * hidden * DTYPES[states].itemsize + scale) + teaching_tokens * (2 * hidden + 8)


@dataclass(frozen=True)
class Layout:
    """What a store holds and where, before and after it is written."""

    root: Path
    rows: Rows
    target: str  # fingerprint
    hidden: int
    taps: tuple[int, ...]
    dtype: torch.dtype  # of the target's forward
    states: str  # bf16 | fp8

    @cached_property
    def identity(self) -> dict[str, str]:
        return {
            "format": FORMAT,
            "rows": self.rows.hash()[:24],
            "target": self.target,
            "taps": ",".join(map(str, self.taps)),
            "dtype": str(self.dtype).removeprefix("torch."),
            "states": self.states,
        }

    @cached_property
    def folder(self) -> Path:
        return self.root / f"states-{sha256_json([self.identity, len(self.spans)])[:24]}"

    @cached_property
    def teaches(self) -> Tensor:
        """bool [tokens of all rows], as `Rows.ids`."""
        answer = self.rows.answer.clone()
        answer[self.rows.offsets[:-1]] = 0  # parts a row's answer from the one before
        return teaching(answer)

    @cached_property
    def taught(self) -> Tensor:
        """int64 [rows + 1]: where each row's teaching positions begin among those of all."""
        before = torch.cat([torch.zeros(1, dtype=torch.int64), self.teaches.long().cumsum(0)])
        return before[self.rows.offsets]

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of each row."""
        pairs = zip(self.rows.lengths.tolist(), self.taught.diff().tolist(), strict=True)
        return [tensor_bytes(t, m, self.hidden, len(self.taps), self.states) for t, m in pairs]

    @cached_property
    def spans(self) -> list[range]:
        """The rows of each shard: runs of about equal size, as many as SHARD_BYTES asks for."""
        total, count = sum(self.sizes), len(self.sizes)
        shards = min(count, max(FEWEST, -(-total // SHARD_BYTES)))
        ends, done = [0], 0
        for row, size in enumerate(self.sizes):
            done += size
            left = shards - len(ends)  # shards that begin behind this row
            if left and (done * shards >= total * len(ends) or count - row - 1 == left):
                ends.append(row + 1)
        return [range(a, b) for a, b in zip(ends, [*ends[1:], count], strict=True) if b > a]

    def path(self, number: int) -> Path:
        return self.folder / f"shard-{number:05d}" / "states.safetensors"

    def size(self, numbers: Sequence[int]) -> int:
        """Bytes on disk of these shards."""
        return sum(HEADER + sum(8 + self.sizes[row] for row in self.spans[n]) for n in numbers)

    def missing(self) -> list[int]:
        return [n for n in range(len(self.spans)) if not self.path(n).is_file()]

    def place(self, row: int) -> tuple[slice, slice]:
        """Where a row lies in its shard: its tokens, and its positions that teach."""
        first = self.spans[self.shard_of[row]][0]
        tokens, taught = (of[[row, row + 1]] - of[first] for of in (self.rows.offsets, self.taught))
        return slice(*tokens.tolist()), slice(*taught.tolist())

    @cached_property
    def shard_of(self) -> list[int]:
        return [number for number, span in enumerate(self.spans) for _ in span]

    def papers(self, number: int) -> dict[str, str]:
        """What a shard says of itself."""
        return {**self.identity, "span": f"{self.spans[number][0]}-{self.spans[number][-1]}"}


def write_shard(layout: Layout, number: int, parts: Sequence[Stored]) -> None:
    """The states of the shard's rows, in order; whole or not at all."""
    rows, path = layout.rows, layout.path(number)
    span = layout.spans[number]
    whole = joined(parts)
    tensors = {"ids": rows.ids[rows.offsets[span[0]] : rows.offsets[span[-1] + 1]].clone()}
    tensors |= {name: t for name, t in zip(NAMES, whole, strict=True) if t is not None}
    tensors[CHECK] = torch.tensor([whole.part(*layout.place(row)).checksum() for row in span])
    try:
        with whole_folder(path.parent) as aside:
            save_file(tensors, aside / path.name, {KEY: json.dumps(layout.papers(number))})
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path} cannot be written: {error}. The shards that are whole were kept: make room, and the same command "
            "again goes on from there."
        ) from error


def refuse_full(layout: Layout, missing: Sequence[int]) -> None:
    """Refuse, before anything is written, what the disk cannot hold."""
    needed, free = layout.size(missing), free_bytes(layout.folder)
    if needed > free:
        raise UserError(
            f"the target's states of {len(layout.rows):,} rows need {needed:,} more bytes ({needed / 1e9:,.2f} GB) in "
            f"{layout.folder}, but {free:,} are free there ({free / 1e9:,.2f} GB). "
            + ("Take data.states=fp8, which is about half of it, " if layout.states == "bf16" else "Take ")
            + "fewer rows (data.sources.NAME.rows) or another disk (data.cache), or train online (data.states=none)."
        )


def free_bytes(folder: Path) -> int:
    """Of the disk that the folder lies on, or will."""
    return shutil.disk_usage(next(p for p in (folder, *folder.absolute().parents) if p.exists())).free


class StateStore:
    """A whole store, memory-mapped: rows are read by their index, in any order and any company."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.files = [_open(layout, number) for number in range(len(layout.spans))]
        # by shard, by row; None: written before there were any
        self.checks = [f.get_tensor(CHECK).tolist() if CHECK in [*f.keys()] else None for f in self.files]

    @property
    def unchecked(self) -> str:
        """A line about the shards that were written without checksums, if there are any."""
        count = self.checks.count(None)
        some = f"{count} of {len(self.checks)} shards in {self.layout.folder} were written without checksums: damage"
        return f"states: {some} to them would not be noticed. Delete them to have them made again." if count else ""

    def read(self, pack: Sequence[int]) -> Stored:
        """The states of rows, end to end. UserError where a shard holds other tokens than the rows."""
        return joined([self._row(row) for row in pack])

    def _row(self, row: int) -> Stored:
        layout, number = self.layout, self.layout.shard_of[row]
        rows, file, (tokens, found) = layout.rows, self.files[number], layout.place(row)
        if not torch.equal(file.get_slice("ids")[tokens], rows.ids[rows.offsets[row] : rows.offsets[row + 1]]):
            raise UserError(f"{layout.path(number)}: row {row} has other token ids than the prepared rows. {MEND}")
        scale = file.get_slice("scale")[tokens] if layout.states == "fp8" else None
        final, best, lse = (file.get_slice(name)[found] for name in ("final", "best", "lse"))
        if not (lse.isfinite().all() and (best >= 0).all()):
            raise UserError(f"{layout.path(number)}: what it says of row {row} is no law of tokens: damaged. {MEND}")
        whole = Stored(file.get_slice("taps")[tokens], scale, final, best, lse)
        checks = self.checks[number]
        if checks is not None and whole.checksum() != checks[row - layout.spans[number][0]]:
            raise UserError(f"{layout.path(number)}: row {row} is not what was written there (crc32): damaged. {MEND}")
        return whole


MEND = "Delete the shard's folder: the same command again makes what is missing."


def _open(layout: Layout, number: int) -> Any:
    """The shard, found to be of this store, whole, and of the right shapes."""
    path, wanted = layout.path(number), layout.papers(number)
    try:
        file = safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read: {error}. {MEND}") from error
    papers = json.loads((file.metadata() or {}).get(KEY, "{}"))
    other = [
        f"  {words}: written for {papers.get(key, 'nothing')}, now {wanted[key]}"
        for key, words in WORDS.items()
        if papers.get(key) != wanted[key]
    ]
    if other:
        raise UserError("\n".join([f"{path} holds other states than this recipe trains on:", *other, MEND]))
    span = layout.spans[number]
    T = int(layout.rows.offsets[span[-1] + 1] - layout.rows.offsets[span[0]])
    m, H, P = int(layout.taught[span[-1] + 1] - layout.taught[span[0]]), layout.hidden, len(layout.taps)
    shapes = {"ids": [T], "taps": [T, P * H], "final": [m, H], "best": [m], "lse": [m]}
    shapes |= {"scale": [T, P]} if layout.states == "fp8" else {}
    there = {name: file.get_slice(name).get_shape() for name in list(file.keys())}
    shapes |= {CHECK: [len(span)]} if CHECK in there else {}
    if there != shapes:
        raise UserError(f"{path} holds {there}, not {shapes}. {MEND}")
    return file
