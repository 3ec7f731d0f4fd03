"""The draft vocabulary: the tokens that supervised slots predict most often, and how much of the text they cover."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from data_prep.rows import Rows
from models.vocab import VocabMap

ENOUGH = 0.95


def predicted(rows: Rows) -> Tensor:
    """bool over the flat tokens: x[p+2] of a supervised slot p, i.e. every answer token but the first of its answer."""
    out = torch.zeros(len(rows.answer), dtype=torch.bool)
    # a row starts with its prompt (mark 0), so an answer never joins the one of the row before
    out[1:] = (rows.answer[1:] == rows.answer[:-1]) & (rows.answer[1:] != 0)
    return out


def build_vocab(rows: Rows, size: int, vocab_size: int, always: Iterable[int]) -> VocabMap:
    """The `size` most frequent predicted tokens, ties by id; `always` (end tokens) is in. size 0 = all V tokens."""
    if size <= 0 or size >= vocab_size:
        return VocabMap.identity(vocab_size)
    counts = torch.bincount(rows.ids[predicted(rows)].long(), minlength=vocab_size)
    counts[list(always)] = int(counts.max()) + 1
    order = torch.sort(counts, descending=True, stable=True).indices
    return VocabMap.from_ids(order[:size].sort().values, vocab_size)


def coverage(rows: Rows, vocab: VocabMap) -> dict[str, Any]:
    """Share of the predicted tokens that the draft vocabulary holds, overall and by source."""
    mask = predicted(rows)
    kept = vocab.t2d[rows.ids.long()] & mask
    sources = sorted({m["source"] for m in rows.meta})
    number = torch.tensor([sources.index(m["source"]) for m in rows.meta], dtype=torch.int64)
    source_of = number.repeat_interleave(rows.lengths)
    held = torch.bincount(source_of[kept], minlength=len(sources)).tolist()
    total = torch.bincount(source_of[mask], minlength=len(sources)).tolist()
    return {
        "tokens": sum(total),
        "overall": sum(held) / max(1, sum(total)),
        "by_source": {s: h / max(1, t) for s, h, t in zip(sources, held, total, strict=True)},
    }
