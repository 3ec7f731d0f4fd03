"""The draft vocabulary: the tokens that supervised slots predict most often, and how much of the text they cover."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from data_prep.rows import Rows
from models.vocab import VocabMap
from recipes.schema import UserError

ENOUGH = 0.95


def predicted(rows: Rows) -> Tensor:
    """bool over the flat tokens: x[p+2] of a supervised slot p, that is every answer token but the first of its answer.

    No slot predicts the first two tokens of a row, and no answer joins that of the row before.
    """
    out = torch.zeros(len(rows.answer), dtype=torch.bool)
    out[1:] = (rows.answer[1:] == rows.answer[:-1]) & (rows.answer[1:] != 0)
    starts = rows.offsets[:-1]
    out[starts] = False
    out[(starts + 1)[rows.lengths > 1]] = False
    return out


def special_tokens(tokenizer: Any, ends: Iterable[int], vocab_size: int) -> list[int]:
    """Ids that a drafter must be able to say however rare they are: the tokenizer's special tokens that the target has
    a row for, and the tokens that end an answer."""
    return sorted({*ends, *(i for i in tokenizer.all_special_ids if i < vocab_size)})


def build_vocab(rows: Rows, size: int, vocab_size: int, always: Iterable[int]) -> VocabMap:
    """The `size` most frequent predicted tokens, ties by id, `always` among them. size 0 = all V tokens."""
    if size <= 0 or size >= vocab_size:
        return VocabMap.identity(vocab_size)
    kept = sorted(set(always))
    if len(kept) > size:
        raise UserError(
            f"eagle.draft_vocab={size} has no room for the {len(kept)} special tokens of the target. Raise it, or "
            "give 0 for the full vocabulary."
        )
    counts = torch.bincount(rows.ids[predicted(rows)].long(), minlength=vocab_size)
    counts[kept] = int(counts.max()) + 1
    order = torch.sort(counts, descending=True, stable=True).indices
    return VocabMap.from_ids(order[:size].sort().values, vocab_size)


def coverage(rows: Rows, vocab: VocabMap) -> dict[str, Any]:
    """Share of the predicted tokens that the draft vocabulary holds, overall, by source and by category."""
    mask = predicted(rows)
    kept = vocab.t2d[rows.ids.long()] & mask

    def by(key: str) -> dict[str, float]:
        names = sorted({m[key] for m in rows.meta})
        number = torch.tensor([names.index(m[key]) for m in rows.meta], dtype=torch.int64)
        group = number.repeat_interleave(rows.lengths)
        held, total = (torch.bincount(group[t], minlength=len(names)).tolist() for t in (kept, mask))
        return {name: h / t for name, h, t in zip(names, held, total, strict=True) if t}

    tokens = int(mask.sum())
    return {
        "tokens": tokens,
        "overall": int(kept.sum()) / max(1, tokens),
        "by_source": by("source"),
        "by_category": by("category"),
    }


def low_coverage(covered: dict[str, Any], which: str) -> list[str]:
    """A warning, or none, about the parts of the `which` tokens that the draft vocabulary covers too little of."""
    shares = {"all": covered["overall"]}
    shares |= {f"source {name}": share for name, share in covered["by_source"].items()}
    shares |= {f"category {name}": share for name, share in covered["by_category"].items()}
    low = [f"{name} {share:.1%}" for name, share in shares.items() if share < ENOUGH]
    if not low or not covered["tokens"]:
        return []
    return [f"the draft vocabulary covers less than {ENOUGH:.0%} of the {which} tokens: {', '.join(low)}"]
