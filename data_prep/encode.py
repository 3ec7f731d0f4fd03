"""Rows of conversations whose answers are kept: the least that is needed, until the general encoder replaces it."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from data_prep.schemas import Conversation, Record, Rendered
from data_prep.supervision import encode_conversation
from data_prep.tally import Refused, Tally
from recipes.schema import UserError


@dataclass(frozen=True)
class Encoded:
    record: Record
    turn: int
    ids: list[int]
    marks: list[int]


def encode_records(
    tokenizer: Any, records: Iterable[Record], args: Mapping[str, Any], tally: Tally
) -> Iterator[Encoded]:
    for r in records:
        tally.read += 1
        if isinstance(r, Conversation):
            try:
                ids, marks = encode_conversation(tokenizer, r.messages, r.arguments(args))
            except UserError as error:
                tally.refuse(Refused("spans not established", str(error)), r.id)
                continue
            if not any(marks):
                tally.refuse(Refused("no answer"), r.id)
                continue
            last = max(i for i, m in enumerate(marks) if m)
            yield Encoded(r, 0, ids[: last + 1], marks[: last + 1])
        elif not isinstance(r, Rendered):
            yield Encoded(r, 0, r.ids, r.marks)
