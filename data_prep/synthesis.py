"""The target writes its own questions: its chat template is fed up to the user turn and it goes on from there.

The idea is Magpie's (Xu et al. 2024, arXiv 2406.08464): an instruction-tuned model that is left inside a user turn
writes what users write, and ends the turn by itself.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from data_prep.duplicates import near_duplicates, normalised, words
from data_prep.loops import is_loop
from data_prep.progress import meter
from data_prep.prompts import Prompt
from data_prep.template import edges, special_ids, tokenise
from models.generate import generate
from models.target import Target
from recipes.schema import SourceConfig, UserError

SURPLUS = 1.3  # at most this many questions are generated for each one wanted
SHORTEST = 3  # words


@dataclass(frozen=True)
class Question:
    """A user turn as the target wrote it: `ids` continue the opening, the end token included when it came."""

    opening: str
    ids: list[int]


def synthesise(
    target: Target, name: str, source: SourceConfig, args: Mapping[str, Any], slots: int, seed: int
) -> tuple[list[Prompt], dict[str, Any]]:
    """Up to `source.rows` questions, and how many fell to which filter. Generates what is missing, up to 1.3x."""
    turn = edges(target.tokenizer, "user", args)
    if not turn.end_ids:
        raise UserError(
            f"data.sources.{name}: the target's chat template ends a user turn with ordinary text ({turn.after!r}), so "
            "the target cannot say when a question ends. Use kind: file or kind: hub with this target."
        )
    stop_ids = turn.end_ids | target.eos_ids
    budget = ceil(SURPLUS * source.rows)
    written: list[Question] = []
    kept: list[str] = []
    fell: Counter[str] = Counter()
    while len(kept) < source.rows and len(written) < budget:
        missing = source.rows - len(kept)
        share = len(kept) / len(written) if written else 1.0
        count = min(budget - len(written), ceil(missing / max(share, 0.1)))
        openings = [source.openings[(len(written) + i) % len(source.openings)] for i in range(count)]
        with meter(f"{name}: the target writes questions", count) as progress:
            answers = generate(
                target,
                [tokenise(target.tokenizer, turn.before + opening) for opening in openings],
                max_new_tokens=source.max_tokens,
                temperatures=[source.temperature] * count,
                slots=slots,
                seed=seed + len(written),
                stop_ids=stop_ids,
                progress=progress,
            )
        written += [Question(o, ids) for o, ids in zip(openings, answers, strict=True)]
        kept, fell = sift(target.tokenizer, written, stop_ids)
    surplus = max(0, len(kept) - source.rows)
    kept = kept[: source.rows]
    report = {
        "wanted": source.rows,
        "generated": len(written),
        "kept": len(kept),
        "surplus": surplus,
        "fell": dict(fell),
    }
    return [Prompt(f"{name}-{i}", [text], name) for i, text in enumerate(kept)], report


def sift(tokenizer: Any, questions: Sequence[Question], stop_ids: frozenset[int]) -> tuple[list[str], Counter[str]]:
    """The questions that pass, as text, in order; and the count of each filter (a question falls to the first one)."""
    markers = special_ids(tokenizer)
    fell: Counter[str] = Counter(
        {"truncated": 0, "markers": 0, "empty": 0, "repetition": 0, "duplicate": 0, "near_duplicate": 0}
    )
    seen: set[str] = set()
    passed: list[str] = []
    for question in questions:
        if not question.ids or question.ids[-1] not in stop_ids:
            fell["truncated"] += 1
            continue
        ids = question.ids[:-1]
        continuation = tokenizer.decode(ids)
        text = (question.opening + continuation).strip()
        if markers.intersection(ids):
            fell["markers"] += 1  # a template marker inside the text: the model lost its place
        elif len(words(continuation)) < SHORTEST:
            fell["empty"] += 1
        elif is_loop(ids):
            fell["repetition"] += 1
        elif normalised(text) in seen:
            fell["duplicate"] += 1
        else:
            seen.add(normalised(text))
            passed.append(text)
    doubles = near_duplicates(passed)
    fell["near_duplicate"] = sum(doubles)
    return [text for text, double in zip(passed, doubles, strict=True) if not double], fell
