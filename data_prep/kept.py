"""Answers that somebody's data came with: their rows, and whether the target would have written them."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from data_prep.dialogue import SHORTEST, Terms
from data_prep.encode import encode_records
from data_prep.loops import is_loop
from data_prep.rows import Row, Rows, make_rows
from data_prep.schemas import Conversation, Record, Rendered
from data_prep.tally import Tally
from data_prep.writer import Request, Writer, noise_seed
from recipes.files import sha256_json

KEPT_A_SHARD = 8192
SAMPLED = 32  # rows of each source whose first answers are held against the target's own
# nats a token. The target's own answers differ from each other by less; other models' and people's answers by more.
UNLIKELY = 0.5


def encode_kept(terms: Terms, part: Sequence[tuple[str, Record]]) -> tuple[Rows, dict[str, Any]]:
    """Rows of (source, record) pairs, cut at the terms' max_length, and what became of them."""
    tally = Tally()
    rows: list[Row] = []
    meta: list[dict[str, Any]] = []
    counts = {"kept_rows": 0, "cut": 0, "no_room": 0}
    for source, group in groupby(part, key=lambda pair: pair[0]):
        for encoded in encode_records(terms.tokenizer, [r for _, r in group], terms.args, tally):
            ids, marks = encoded.ids[: terms.max_length], encoded.marks[: terms.max_length]
            if sum(map(bool, marks)) < SHORTEST:
                counts["no_room"] += 1
                continue
            cut = len(encoded.ids) > terms.max_length
            counts["cut"] += cut
            rows.append((ids, marks))
            record = encoded.record
            answers: dict[int, list[int]] = defaultdict(list)
            for token, mark in zip(ids, marks, strict=True):
                answers[mark].append(token)
            answers.pop(0, None)  # what is no answer
            meta.append(
                {
                    "id": record.id,
                    "source": source,
                    "category": record.category,
                    "key": key_of(record),
                    "temperature": None,
                    "loop": any(map(is_loop, answers.values())),
                    "turn": encoded.turn,
                    "fate": "cut" if cut else "ended",
                }
            )
    counts["kept_rows"] = len(rows)
    tokens = sum(sum(map(bool, marks)) for _, marks in rows)
    report = {"prompts": len(part), "rows": len(rows), "answer_tokens": tokens, **counts, "examples": told(tally)}
    return make_rows(rows, meta), {**report, "kept_refused": dict(tally.refused), "kept_mended": dict(tally.repaired)}


def told(tally: Tally) -> dict[str, list[str]]:
    """Reason -> the first rows that it befell, in words."""
    return {reason: [": ".join(filter(None, place)) for place in places] for reason, places in tally.examples.items()}


def key_of(record: Record) -> str:
    """Hash of what is asked, or of the whole record where questions and answers were not told apart."""
    if isinstance(record, Conversation):
        return record.key
    return sha256_json(record.text if isinstance(record, Rendered) else record.ids)


def unlikely(writer: Writer, terms: Terms, rows: Rows, seed: int) -> tuple[dict[str, Any], list[str]]:
    """For each source whose answers were kept: mean log-probability a token of its first answers under the target, and
    of the target's own answers to the same prompts at temperature 1; and a warning where the first is much lower."""
    found: dict[str, Any] = {}
    warnings: list[str] = []
    for source, places in _samples(rows).items():
        theirs = [(rows.row(i)[0].tolist(), start) for i, start, _ in places]
        theirs = [(ids[:end], start) for (ids, start), (_, _, end) in zip(theirs, places, strict=True)]
        requests = [Request(ids[:start], min(terms.answer_tokens, len(ids) - start), 1.0) for ids, start in theirs]
        label = f"{source}: the target's own answers beside those kept"
        written = writer.write(requests, terms.stop_ids, noise_seed(seed, source, "kept"), label)
        own = [(r.prompt + answer, len(r.prompt)) for r, answer in zip(requests, written, strict=True) if answer]
        kept_mean, own_mean = _mean(writer, theirs), _mean(writer, own)
        if kept_mean is None or own_mean is None:
            found[source] = "not checked: no log-probabilities of a prompt to be had from this server"
            continue
        found[source] = {"rows": len(places), "kept": round(kept_mean, 3), "target": round(own_mean, 3)}
        if kept_mean < own_mean - UNLIKELY:
            warnings.append(
                f"the kept answers of {source} are unlikely under the target: mean log-probability {kept_mean:.2f} a "
                f"token, its own answers {own_mean:.2f} ({len(places)} rows). A drafter learns the target's words: set "
                f"data.sources.{source}.answers=regenerate"
            )
    return found, warnings


def _samples(rows: Rows) -> dict[str, list[tuple[int, int, int]]]:
    """source -> (row, start and end of its first answer) of up to SAMPLED kept rows, chosen by their keys."""
    kept: dict[str, list[int]] = defaultdict(list)
    for i in sorted(range(len(rows)), key=lambda i: rows.meta[i]["key"]):
        if rows.meta[i]["temperature"] is None:
            kept[rows.meta[i]["source"]].append(i)
    return {source: [*_first_answers(rows, places[:SAMPLED])] for source, places in kept.items()}


def _first_answers(rows: Rows, places: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    for i in places:
        marked = rows.row(i)[1].nonzero().flatten()
        start, number = int(marked[0]), rows.row(i)[1][marked[0]]
        if start > 0:
            yield i, start, int((rows.row(i)[1] == number).nonzero()[-1]) + 1


def _mean(writer: Writer, rows: list[tuple[list[int], int]]) -> float | None:
    """Over all tokens of all rows."""
    scores = writer.logprobs(rows) if rows else None
    if scores is None:
        return None
    lengths = [len(ids) - start for ids, start in rows]
    return sum(s * n for s, n in zip(scores, lengths, strict=True)) / sum(lengths)
