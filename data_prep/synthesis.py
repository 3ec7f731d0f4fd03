"""The target writes its own questions: its chat template is fed up to the user turn and it goes on from there.

The idea is Magpie's (Xu et al. 2024, arXiv 2406.08464): an instruction-tuned model that is left inside a user turn
writes what users write, and ends the turn by itself. Left alone it returns to a few favourite subjects, so questions
are drawn at several temperatures, and every other one after a system turn that names a subject which the target itself
drew up.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from data_prep.dialogue import Terms
from data_prep.duplicates import near_duplicates, normalised, words
from data_prep.loops import is_loop
from data_prep.prompts import Prompt
from data_prep.template import SENTINEL, edges, render, special_ids, tokenise
from data_prep.writer import Request, Writer, noise_seed
from recipes.schema import SourceConfig, UserError

SURPLUS = 1.3  # at most this many questions are generated for each one wanted
SHORTEST, LONGEST_SUBJECT = 3, 6  # words
LISTING, BEGUN = "Give me a list of 20 different topics that people ask about.", "1."
LIST_TOKENS, LIST_TEMPERATURE = 128, 0.9
A_LIST = 6  # different subjects that a list is good for; the second and third repeat much of the first
ENTRY = re.compile(r"\s*\d+[.)]\s*([^:(\n]+)")
ABOUT = "The user asks about this subject: {}"


@dataclass(frozen=True)
class Question:
    """A user turn as the target wrote it: `ids` continue the opening, the end token included when it came."""

    opening: str
    ids: list[int]


def synthesise(
    writer: Writer, terms: Terms, name: str, source: SourceConfig, seed: int
) -> tuple[list[Prompt], dict[str, Any]]:
    """Up to `source.rows` questions, and how many fell to which filter. Generates what is missing, up to 1.3x."""
    tokenizer, args = terms.tokenizer, terms.args
    turn = edges(tokenizer, "user", args)
    if not turn.end_ids:
        raise UserError(
            f"data.sources.{name}: the target's chat template ends a user turn with ordinary text ({turn.after!r}), so "
            "the target cannot say when a question ends. Use kind: file or kind: hub with this target."
        )
    stop_ids = turn.end_ids | terms.stop_ids
    budget = ceil(SURPLUS * source.rows)
    subjects = draw_subjects(writer, terms, name, source.subjects, seed) if source.subjects else []
    befores = [turn.before] + [_before(tokenizer, subject, args) for subject in subjects]
    written: list[Question] = []
    kept: list[str] = []
    fell: Counter[str] = Counter()
    while len(kept) < source.rows and len(written) < budget:
        missing = source.rows - len(kept)
        share = len(kept) / len(written) if written else 1.0
        count = min(budget - len(written), ceil(missing / max(share, 0.1)))
        places = range(len(written), len(written) + count)
        openings = [source.openings[i % len(source.openings)] for i in places]
        requests = [
            Request(
                tokenise(tokenizer, _dealt(befores, i // len(source.openings)) + opening),
                source.max_tokens,
                source.temperatures[i // (2 * len(source.openings)) % len(source.temperatures)],
            )
            for i, opening in zip(places, openings, strict=True)
        ]
        label = f"{name}: the target writes questions"
        answers = writer.write(requests, stop_ids, noise_seed(seed, len(written)), label)
        written += [Question(o, ids or []) for o, ids in zip(openings, answers, strict=True)]
        kept, fell = sift(tokenizer, written, stop_ids)
    surplus = max(0, len(kept) - source.rows)
    kept = kept[: source.rows]
    report = {
        "wanted": source.rows,
        "generated": len(written),
        "kept": len(kept),
        "surplus": surplus,
        "subjects": len(subjects),
        "distinct": distinct(kept),
        "fell": dict(fell),
    }
    return [Prompt(f"{name}-{i}", [text], name) for i, text in enumerate(kept)], report


def draw_subjects(writer: Writer, terms: Terms, name: str, count: int, seed: int) -> list[str]:
    """Up to `count` different subjects, out of lists that the target writes when it is asked for them."""
    asked = render(terms.tokenizer, [{"role": "user", "content": LISTING}], terms.args, generation=True)
    # begun for it, a small model does write a list
    prompt = tokenise(terms.tokenizer, asked + BEGUN)
    requests = [Request(prompt, LIST_TOKENS, LIST_TEMPERATURE)] * ceil(count / A_LIST)
    label = f"{name}: the target names subjects"
    lists = writer.write(requests, terms.stop_ids, noise_seed(seed, "subjects"), label)
    found: dict[str, str] = {}
    for ids in lists:
        text = BEGUN + terms.tokenizer.decode(ids or [], skip_special_tokens=True)
        for line in text.split("\n")[:-1]:  # the last one may be broken off
            entry = ENTRY.match(line)
            subject = entry[1].strip(" .,;*-") if entry else ""
            if 1 <= len(words(subject)) <= LONGEST_SUBJECT:
                found.setdefault(normalised(subject), subject)
    return [*found.values()][:count]


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


def distinct(texts: Sequence[str]) -> float:
    """Different word trigrams over all of them (distinct-3, Li et al. 2016): the lower, the more alike the texts."""
    parts = [words(text) for text in texts]
    trigrams = [gram for p in parts for gram in zip(p, p[1:], p[2:], strict=False)]
    return round(len(set(trigrams)) / max(1, len(trigrams)), 3)


def _before(tokenizer: Any, subject: str, args: Mapping[str, Any]) -> str:
    """From the start of a conversation about a subject to the first word of the user."""
    messages = [{"role": "system", "content": ABOUT.format(subject)}, {"role": "user", "content": SENTINEL}]
    return render(tokenizer, messages, args).partition(SENTINEL)[0]


def _dealt(befores: Sequence[str], i: int) -> str:
    """Every other question without a subject, the rest on one subject after the other."""
    subjects = len(befores) - 1
    return befores[1 + i // 2 % subjects] if subjects and i % 2 else befores[0]
