"""The answers stage: conversations answered by the target, or with the answers they came with, in shards on disk."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep import shards
from data_prep.dialogue import FATES, Dialogue, Terms
from data_prep.kept import KEPT_A_SHARD, encode_kept, told, unlikely
from data_prep.rows import Rows, make_rows
from data_prep.schemas import Conversation, Record
from data_prep.tally import Refused, Tally
from data_prep.writer import Writer
from recipes.files import locked, write_json
from recipes.schema import DataConfig


@dataclass(frozen=True)
class Work:
    """What is to be answered and what is kept, each with the name of its source."""

    asked: list[tuple[str, Conversation]]
    kept: list[tuple[str, Record]]

    @classmethod
    def of(cls, pairs: Sequence[tuple[str, Record]], data: DataConfig) -> "Work":
        """A record that is rendered or tokenised already holds its answers, whatever its source says."""
        asked: list[tuple[str, Conversation]] = []
        kept: list[tuple[str, Record]] = []
        for name, record in pairs:
            if isinstance(record, Conversation) and data.sources[name].answers == "regenerate":
                asked.append((name, record))
            else:
                kept.append((name, record))
        return cls(asked, kept)


def answer(
    folder: Path, work: Work, writer: Writer, terms: Terms, data: DataConfig, seed: int, wanted: Mapping[str, Any]
) -> dict[str, Any]:
    """Make the shards that are missing and the report, with which the stage is complete. `wanted`: the manifest.

    Killed at any moment and called again, it ends with the same shards (a server's: with the same rows).
    """
    with locked(folder, "making these answers"):
        manifest = shards.begin(folder, {**wanted, **writer.describe()})
        writer.follow(manifest)
        spans = shards.spans(len(work.asked), int(manifest["rows_a_shard"]))
        kept = shards.spans(len(work.kept), KEPT_A_SHARD)
        numbers = range(len(spans) + len(kept))
        missing = [n for n in numbers if not shards.path_of(folder, n).exists()]
        if 0 < len(missing) < len(numbers):
            print(f"data: answers: {len(numbers) - len(missing)} of {len(numbers)} shards are there", flush=True)
        began = time.monotonic()
        rates, tokens = data.temperatures, Counter[str]()

        def begin(span: range) -> list[Dialogue]:
            return [Dialogue(terms, work.asked[i][0], work.asked[i][1], rates[i % len(rates)]) for i in span]

        def done(number: int, dialogues: list[Dialogue], troubles: Mapping[str, int]) -> None:
            rows, report = _gather(dialogues, troubles)
            shards.write_shard(folder, number, manifest, rows, report)
            tokens.update(written=report["answer_tokens"])

        for n in missing:
            if n >= len(spans):
                part = [work.kept[i] for i in kept[n - len(spans)]]
                shards.write_shard(folder, n, manifest, *encode_kept(terms, part))
        writer.answer({n: spans[n] for n in missing if n < len(spans)}, begin, seed, done)
        seconds = time.monotonic() - began
        report = _report(folder, manifest, numbers)
        report["seconds"] = round(seconds, 1)
        report["tokens_per_s"] = round(tokens["written"] / max(seconds, 1e-9), 1)
        report["kept_likelihood"], report["warnings"] = unlikely(writer, terms, shards.read(folder), seed)
        write_json(folder / "report.json", report)
    return report


def _gather(dialogues: list[Dialogue], troubles: Mapping[str, int]) -> tuple[Rows, dict[str, Any]]:
    """The rows of a shard and what became of its dialogues; nothing in it depends on when or how fast it was made."""
    made = [pair for d in dialogues for pair in d.rows()]
    fates, tally = Counter(d.fate for d in dialogues), Tally()
    for dialogue in dialogues:
        if dialogue.why:
            where = f"{dialogue.source}, {dialogue.conversation.id}"
            reason = "a later turn without an answer" if dialogue.fate == "ended" else dialogue.fate
            tally.refuse(Refused(reason, dialogue.why), where)
    report = {
        "prompts": len(dialogues),
        "rows": len(made),
        "answer_tokens": sum(len(marks) - list(marks).count(0) for (_, marks), _ in made),
        **{fate: fates[fate] for fate in FATES},
        "turns_left_out": sum(d.left_out for d in dialogues if d.rows()),
        "unanswered": dict(tally.refused),
        "examples": told(tally),
        "troubles": dict(sorted(troubles.items())),
    }
    return make_rows([row for row, _ in made], [meta for _, meta in made]), report


def _report(folder: Path, manifest: Mapping[str, Any], numbers: range) -> dict[str, Any]:
    """The counts of all shards, added up."""
    parts = [shards.report_of(folder, n, manifest) for n in numbers]
    names = ("prompts", "rows", "answer_tokens", *FATES, "turns_left_out", "kept_rows")
    report: dict[str, Any] = {name: sum(part.get(name, 0) for part in parts) for name in names}
    for name in ("troubles", "unanswered", "kept_refused", "kept_mended"):  # reason -> count
        report[name] = dict(sum((Counter(part.get(name, {})) for part in parts), Counter[str]()))
    examples: dict[str, list[str]] = {}
    for part in parts:
        for reason, texts in part["examples"].items():
            examples[reason] = [*examples.get(reason, []), *texts][:3]
    shown = {k: manifest[k] for k in ("writer", "dtype", "device", "served") if k in manifest}
    return {**report, "examples": examples, "shards": len(parts), **shown}
