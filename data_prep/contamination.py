"""Evaluation prompts are kept out of training, and what still stands in both is counted in word n-grams."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from data_prep.duplicates import near_duplicates, normalised, words
from data_prep.prompts import Prompt, load_prompts
from data_prep.schemas import Conversation, Record, Rendered
from recipes.schema import Recipe

NGRAM = 8  # words; a shorter evaluation prompt is one n-gram of its own length
HEAVY = 0.5  # share of an evaluation prompt's n-grams, found in training, from which on it is named
SHOWN = 3

Decode = Callable[[list[int]], str]


def evaluation_sets(recipe: Recipe) -> dict[str, list[Prompt]]:
    """The prompts that figures are measured on: those that ship with Espalier, and the recipe's own."""
    sets = {"report": load_prompts("report")}
    if recipe.eval.prompts != "report":
        sets["eval.prompts"] = load_prompts(recipe.eval.prompts, recipe.eval.limit)
    return sets


def asked(record: Record, decode: Decode) -> list[str]:
    """What a record asks, turn by turn; the whole of it where questions and answers are not told apart."""
    if isinstance(record, Conversation):
        return [m["content"] for m in record.messages if m["role"] == "user"]
    return [record.text if isinstance(record, Rendered) else decode(record.ids)]


def sift(
    pairs: Sequence[tuple[str, Record]], sets: Mapping[str, Sequence[Prompt]], decode: Decode
) -> tuple[list[tuple[str, Record]], dict[str, int]]:
    """The (source, record) pairs that ask nothing twice and nothing that an evaluation set asks; and what fell.

    A record falls to an evaluation set when its first turn, or all its turns together, nearly equal that of a prompt.
    """
    questions = [asked(record, decode) for _, record in pairs]
    fell = Counter({f"in_{name.replace('.', '_')}": 0 for name in sets} | {"repeated": 0})
    out: set[int] = set()
    for name, prompts in sets.items():
        against = [text for p in prompts for text in _forms(p.turns)]
        forms = [(i, text) for i, turns in enumerate(questions) if i not in out for text in _forms(turns)]
        verdicts = near_duplicates([text for _, text in forms], against, among=False)
        hit = {i for (i, _), verdict in zip(forms, verdicts, strict=True) if verdict}
        fell[f"in_{name.replace('.', '_')}"] = len(hit)
        out |= hit
    seen: set[str] = set()
    kept = []
    for i, pair in enumerate(pairs):
        if i in out:
            continue
        text = "\n".join(map(normalised, [_system(pair[1]), *questions[i]]))
        if text in seen:
            fell["repeated"] += 1
        else:
            seen.add(text)
            kept.append(pair)
    return kept, dict(fell)


def contamination(training: Iterable[Sequence[str]], sets: Mapping[str, Sequence[Prompt]]) -> dict[str, Any]:
    """For each evaluation set, which of its n-grams stand in the training questions too (lists of turns)."""
    grams = {name: [_grams(" ".join(p.turns)) for p in prompts] for name, prompts in sets.items()}
    wanted = {gram for of_prompts in grams.values() for of_prompt in of_prompts for gram in of_prompt}
    lengths = sorted({gram.count(" ") + 1 for gram in wanted})
    there: set[str] = set()
    for turns in training:
        parts = words(" ".join(turns))
        for n in lengths:
            there |= wanted.intersection(" ".join(parts[i : i + n]) for i in range(len(parts) - n + 1))
    return {name: _overlap(sets[name], of_prompts, there) for name, of_prompts in grams.items()}


def warnings(found: Mapping[str, Any]) -> list[str]:
    return [
        f"{overlap['heavy']} of the {overlap['prompts']} prompts of {name} have half or more of their {NGRAM}-grams in "
        f"the training prompts: {'; '.join(overlap['examples'])}"
        for name, overlap in found.items()
        if overlap["heavy"]
    ]


def _overlap(prompts: Sequence[Prompt], grams: Sequence[set[str]], there: set[str]) -> dict[str, Any]:
    shares = [(len(g & there) / len(g), p, g) for p, g in zip(prompts, grams, strict=True) if g]
    heavy = sorted((s for s in shares if s[0] >= HEAVY), key=lambda s: (-s[0], s[1].id))
    return {
        "prompts": len(prompts),
        "touched": sum(share > 0 for share, _, _ in shares),
        "heavy": len(heavy),
        "ngrams": sum(map(len, grams)),
        "found": sum(len(g & there) for g in grams),
        "examples": [f"{p.id} {share:.0%} ({min(g & there)!r})" for share, p, g in heavy[:SHOWN]],
    }


def _grams(text: str) -> set[str]:
    parts = words(text)
    n = min(NGRAM, len(parts))
    return {" ".join(parts[i : i + n]) for i in range(len(parts) - n + 1)} if parts else set()


def _system(record: Record) -> str:
    first = record.messages[0] if isinstance(record, Conversation) else {"role": ""}
    return str(first["content"]) if first["role"] == "system" else ""


def _forms(turns: Sequence[str]) -> list[str]:
    """The first turn, and all of them together where there are more."""
    return [turns[0], " ".join(turns)] if len(turns) > 1 else list(turns)
