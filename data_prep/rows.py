"""Token rows on disk: ids and answer marks end to end in one safetensors file, one line of JSON a row beside it."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from recipes.files import whole_folder, write_text
from recipes.schema import UserError

TENSORS = {"ids": torch.int32, "answer": torch.uint8, "offsets": torch.int64}
Row = tuple[Sequence[int], Sequence[int]]  # ids, answer marks


@dataclass(frozen=True)
class Rows:
    """N rows. Row i lies at offsets[i] .. offsets[i+1] of `ids` and `answer` (0 = prompt, k = k-th answer)."""

    ids: Tensor
    answer: Tensor
    offsets: Tensor  # [N + 1]
    meta: list[dict[str, Any]]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Tensor:
        """int64 [N]"""
        return self.offsets.diff()

    def row(self, i: int) -> tuple[Tensor, Tensor]:
        """(ids int64 [T], answer int32 [T])"""
        part = slice(int(self.offsets[i]), int(self.offsets[i + 1]))
        return self.ids[part].long(), self.answer[part].int()

    def hash(self) -> str:
        """Of their tokens and marks."""
        digest = hashlib.sha256()
        for tensor in (self.ids, self.answer, self.offsets):
            digest.update(tensor.contiguous().numpy().data)
        return digest.hexdigest()

    def subset(self, keep: Sequence[int]) -> "Rows":
        parts = [slice(int(self.offsets[i]), int(self.offsets[i + 1])) for i in keep]
        offsets = torch.tensor([0, *[p.stop - p.start for p in parts]], dtype=torch.int64).cumsum(0)
        ids, answer = (torch.cat([t[:0], *[t[p] for p in parts]]) for t in (self.ids, self.answer))
        return Rows(ids, answer, offsets, [self.meta[i] for i in keep])

    @staticmethod
    def load(folder: Path) -> "Rows":
        """Read and check; a damaged folder is a UserError that says what to delete."""
        try:
            tensors = load_file(folder / "rows.safetensors")
            meta = read_lines(folder / "meta.jsonl")
            _check(tensors, len(meta))
        except (OSError, SafetensorError, ValueError) as error:
            raise UserError(
                f"{folder}: token rows cannot be read: {error}. Delete the folder and prepare again."
            ) from error
        return Rows(tensors["ids"], tensors["answer"], tensors["offsets"], meta)


def make_rows(rows: Sequence[Row], meta: Sequence[dict[str, Any]]) -> Rows:
    assert len(rows) == len(meta)
    lengths = torch.tensor([0, *[len(ids) for ids, _ in rows]], dtype=torch.int64)
    ids = torch.tensor([t for row, _ in rows for t in row], dtype=torch.int32)
    answer = torch.tensor([a for _, row in rows for a in row], dtype=torch.uint8)
    return Rows(ids, answer, lengths.cumsum(0), list(meta))


def joined(parts: Sequence[Rows]) -> Rows:
    """One after the other."""
    lengths = torch.cat([torch.zeros(1, dtype=torch.int64), *(p.lengths for p in parts)])
    ids = torch.cat([torch.zeros(0, dtype=torch.int32), *(p.ids for p in parts)])
    answer = torch.cat([torch.zeros(0, dtype=torch.uint8), *(p.answer for p in parts)])
    return Rows(ids, answer, lengths.cumsum(0), [m for p in parts for m in p.meta])


def split_by_prompt(rows: Rows, good: Sequence[int], held_out: int) -> tuple[list[int], list[int]]:
    """(training, held-out) indices of the `good` rows: at least `held_out` rows, by whole prompts, as far as there are.

    Rows of one prompt (`key` in their meta: answers of several temperatures, turns of one dialogue) stand on one side.
    Which side follows from the key's hash alone, so a prompt keeps its side when others come or go.
    """
    of_key: dict[str, list[int]] = {}
    for i in good:
        of_key.setdefault(rows.meta[i]["key"], []).append(i)
    held: list[int] = []
    for key in sorted(of_key):
        if len(held) >= held_out:
            break
        held += of_key[key]
    apart = set(held)
    return [i for i in good if i not in apart], sorted(held)


def write_rows(rows: Rows, folder: Path) -> None:
    """Write the folder whole; `folder` must not exist yet."""
    with whole_folder(folder) as scratch:
        save_file({"ids": rows.ids, "answer": rows.answer, "offsets": rows.offsets}, scratch / "rows.safetensors")
        write_lines(scratch / "meta.jsonl", rows.meta)


def write_lines(path: Path, values: Sequence[dict[str, Any]]) -> None:
    """JSON lines."""
    write_text(path, "".join(json.dumps(v, ensure_ascii=False) + "\n" for v in values))


def read_lines(path: Path) -> list[dict[str, Any]]:
    # not splitlines: a JSON string may hold U+2028 and its like as they are
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def _check(tensors: dict[str, Tensor], rows: int) -> None:
    if set(tensors) != set(TENSORS):
        raise ValueError(f"holds {sorted(tensors)}, not {sorted(TENSORS)}")
    for name, dtype in TENSORS.items():
        if tensors[name].dtype != dtype or tensors[name].dim() != 1:
            raise ValueError(f"{name} is {tensors[name].dtype} of {tensors[name].dim()} dimensions, not {dtype} of one")
    ids, answer, offsets = tensors["ids"], tensors["answer"], tensors["offsets"]
    if len(offsets) != rows + 1:
        raise ValueError(f"{len(offsets) - 1} rows but {rows} lines in meta.jsonl")
    if len(ids) != len(answer):
        raise ValueError(f"{len(ids)} ids but {len(answer)} answer marks")
    if int(offsets[0]) != 0 or int(offsets[-1]) != len(ids) or bool((offsets.diff() < 1).any()):
        raise ValueError("offsets do not divide the ids into rows")
    if len(ids) and int(ids.min()) < 0:
        raise ValueError("negative token ids")
