"""Written conversations as rows of tokens with their answers marked, as the chat template itself shows them.

For each answer two texts are wanted: what a server is given when the answer is due (the opening), and the
conversation through the answer. The answer is what the second adds to the first, up to its end marker. As long as one
text goes on in the next, they make one row; where the template rewrites the past (drops earlier reasoning, for one),
the next answer starts a row of its own, so that every row is what a server saw. Rows are tokenised once, in batches.

The template is asked for both texts of each answer, unless there are many and it lets itself be followed (turns.py).
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from data_prep.schemas import MOST_ANSWERS, Conversation, Record, Rendered, Tokenised
from data_prep.tally import Refused, Tally
from data_prep.template import (
    REASONING,
    SENTINEL,
    Edges,
    Message,
    edges,
    has_markers,
    render,
    render_all,
    special_texts,
)
from data_prep.turns import follow
from recipes.files import sha256_json
from recipes.schema import UserError

SCREEN = 1500  # characters of a rendered conversation that are shown
CHUNK = 256  # records that are rendered, then tokenised in one call
LONGEST_OPENING = 200  # characters that an opening may put into an answer's mouth
MANY = 4  # answers from which on a conversation is followed instead of rendered for each of them


@dataclass(frozen=True)
class Encoded:
    """A row. `turn` is 0 for a whole record, else the number of the last answer of the part that the row shows."""

    record: Record
    turn: int
    ids: list[int]
    marks: list[int]  # 0 = not an answer, k = k-th answer of this row, its end marker included


@dataclass(frozen=True)
class Text:
    """A row before it is tokenised; spans in characters, in order, with the number of their answer."""

    record: Record
    turn: int
    text: str
    spans: list[tuple[int, int, int]]


@dataclass(frozen=True)
class Answer:
    """The text that a server had seen when an answer was complete, and which parts of it the model wrote.

    `text` goes on at character `past` of a text that all answers of a conversation share; parts count from its start.
    """

    past: int
    text: str
    parts: list[tuple[int, int]]


def encode_records(
    tokenizer: PreTrainedTokenizerBase, records: Iterable[Record], args: Mapping[str, Any], tally: Tally
) -> Iterator[Encoded]:
    """Rows in the order of the records, made as they are asked for. Nothing is cut; what is refused is in the tally.

    A row ends with the end marker of its last answer. Time is linear in the tokens, but where a template looks ahead of
    the turn that it writes (`loop.last`, say): there a dialogue is rendered twice for each of its answers, and beyond
    some twenty turns that costs more than tokenising it.
    """
    if not tokenizer.is_fast:
        raise UserError("the target's tokenizer is not a fast one, so it gives no offsets. Use a fast tokenizer.")
    reader = Reader(tokenizer, args)
    left = iter(records)
    while chunk := list(islice(left, CHUNK)):
        rows: list[Text | Encoded] = []
        for record in chunk:
            try:
                rows += reader.texts(record, tally)
            except Refused as refusal:
                tally.refuse(refusal, record.id)
        texts = [row.text for row in rows if isinstance(row, Text)]
        encodings = iter(_encodings(tokenizer, texts))
        for row in rows:
            try:
                yield row if isinstance(row, Encoded) else reader.mark(row, next(encodings), tally)
            except Refused as refusal:
                tally.refuse(refusal, row.record.id)


class Reader:
    """Rows of records as text. Holds what the template says of itself, asked once for each set of arguments."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, args: Mapping[str, Any]) -> None:
        self.tokenizer, self.args = tokenizer, args
        self.markers = special_texts(tokenizer)
        self.marked = has_markers(tokenizer)
        self.known: dict[str, Edges] = {}
        self.special_ids = set(tokenizer.added_tokens_decoder)
        self.openings: dict[str, list[int]] = {}  # tokens of the last words before an answer
        self._edges(args)  # a template that cannot be read is refused at once, not row by row

    def texts(self, record: Record, tally: Tally) -> list[Text | Encoded]:
        if isinstance(record, Tokenised):
            if max(record.ids) >= len(self.tokenizer):
                why = f"id {max(record.ids)}, but the vocabulary ends at {len(self.tokenizer) - 1}"
                raise Refused("tokens of another tokenizer", why)
            return [Encoded(record, 0, record.ids, record.marks)]
        if isinstance(record, Rendered):
            return [self._rendered(record, tally)]
        return self._conversation(record, tally)

    def _conversation(self, record: Conversation, tally: Tally) -> list[Text | Encoded]:
        places = [i for i, m in enumerate(record.messages) if m["role"] == "assistant"]
        if not places:
            raise Refused("no answer to keep")
        if places[-1] + 1 < len(record.messages):
            tally.repair("a last question without an answer: left out", record.id)
        args = record.arguments(self.args)
        past, answers = self._answers(record, places, args)
        rows: list[Text | Encoded] = []
        spans: list[tuple[int, int, int]] = []
        for i, answer in enumerate(answers):
            number = spans[-1][2] + 1 if spans else 1
            spans += [(start, end, number) for start, end in answer.parts]
            last = i + 1 == len(answers)
            if last or number == MOST_ANSWERS or not _goes_on(past, answer, answers[i + 1]):
                if spans:
                    text = past[: answer.past] + answer.text
                    rows.append(Text(record, 0 if last and not rows else i + 1, text, spans))
                spans = []
        if not rows:
            raise Refused(
                "the template's generation markers leave every answer out",
                _show(past[: answers[-1].past] + answers[-1].text),
            )
        return rows

    def _answers(self, record: Conversation, places: list[int], args: dict[str, Any]) -> tuple[str, list[Answer]]:
        """The answers at `places`, and the text that they share."""
        said = [(i, record.messages[i]) for i in places]
        try:
            around = self._edges(args)
            course = follow(self.tokenizer, record.messages[: places[-1] + 1], args) if len(places) >= MANY else None
            if course and places[0] > course.first:
                texts = [(m, *course.answer(i, LONGEST_OPENING)) for i, m in said]
                with contextlib.suppress(Refused):  # refused again below, with the whole text to show
                    return course.text, [self._answer(*text, around) for text in texts]
            openings = render_all(self.tokenizer, [record.messages[:i] for i in places], args, generation=True)
            shown = render_all(self.tokenizer, [record.messages[: i + 1] for i in places], args)
        except UserError as error:
            raise Refused("the chat template refuses the conversation", str(error)) from error
        pairs = zip(said, openings, shown, strict=True)
        return "", [self._answer(m, 0, opening, text, parts, around) for (_, m), (opening, _), (text, parts) in pairs]

    def _answer(
        self, message: Message, past: int, opening: str, shown: str, written: list[tuple[int, int]], around: Edges
    ) -> Answer:
        """An answer as the server that gave it had it; `opening` and `shown` without the `past` characters before them.

        `written`: what generation blocks wrote of `shown`.
        """
        end = len(shown) - len(around.trailer) if shown.endswith(around.trailer) else len(shown)
        marker = next((m for m in self.markers if shown.endswith(m, 0, end)), "")
        if not marker:
            raise Refused("no end marker behind an answer", _show(shown))
        if around.end in message["content"]:
            raise Refused("an end marker inside an answer", repr(message["content"])[:80])
        if not shown.startswith(opening) or not _holds(shown[len(opening) : end], message["content"]):
            return self._as_written(message, past, opening, shown[: end - len(marker)], around)
        if not all(_holds(shown[len(opening) : end], str(message.get(key, ""))) for key in REASONING):
            raise Refused("reasoning that the chat template does not show", _show(shown))
        calls = [str(call.get("function", call)["name"]) for call in message.get("tool_calls", [])]
        if not all(_holds(shown[len(opening) : end], name) for name in calls):
            raise Refused("tool calls that the chat template does not show", _show(shown))
        parts = [(len(opening), end)]
        if self.marked:
            parts = _inside(written, len(opening), end, marker)
        return Answer(past, shown[:end], [(past + a, past + b) for a, b in parts])

    def _as_written(self, message: Message, past: int, opening: str, shown: str, around: Edges) -> Answer:
        """An answer of which the template shows only the end, the rest being reasoning: the text as it was written."""
        written = message["content"]
        words, seen = _squeezed(written), _squeezed(shown[_common(opening, shown) :])
        if not seen or seen == words or not words.endswith(seen) or "tool_calls" in message:
            why = f"it opens an answer with {opening[-60:]!r}, but shows this one as\n{_show(shown)}"
            raise Refused("the chat template shows an answer otherwise than it opens one", why)
        text = opening + written[_overlap(opening, written) :] + around.end
        return Answer(past, text, [(past + len(opening), past + len(text))])

    def _rendered(self, record: Rendered, tally: Tally) -> Text:
        """Spans from the header and the end marker that the template writes around an answer."""
        around, text, header = self._edges(self.args), record.text, self._header()
        begin = self.tokenizer.bos_token or ""
        bare = bool(begin) and around.before.startswith(begin) and not text.startswith(begin)
        text = begin * bare + text
        spans: list[tuple[int, int, int]] = []
        end = 0
        while (found := text.find(header, end)) >= 0:
            start = found + len(header)
            stop = text.find(around.end, start)
            end = stop + len(around.end) if stop >= 0 else len(text)
            spans.append((start, end, len(spans) + 1))
        if not spans:
            raise Refused("rendered text without an answer of this template", f"no {header!r} in\n{_show(record.text)}")
        if len(spans) > MOST_ANSWERS:
            raise Refused(f"more than {MOST_ANSWERS} answers in one row")
        if bare:
            tally.repair("rendered text without the token that begins it: added", record.id)
        if not text.endswith(around.end, 0, end):
            tally.repair("rendered text whose last answer has no end marker: kept as cut short", record.id)
        return Text(record, 0, text[:end], spans)

    def _header(self) -> str:
        """What stands between the end of a question and its answer, without the end marker of the question."""
        asked: list[Message] = [{"role": "user", "content": SENTINEL}]
        between = render(self.tokenizer, asked, self.args, generation=True).partition(SENTINEL)[2]
        marker = next((m for m in self.markers if between.lstrip().startswith(m)), "")
        return between.lstrip().removeprefix(marker).lstrip() or between.strip()

    def mark(self, row: Text, encoding: Any, tally: Tally) -> Encoded:
        """Tokens of the row's text, with those of each span marked."""
        ids: list[int] = encoding.ids
        marks = [0] * len(ids)
        as_served = True
        for start, end, number in row.spans:
            first, last = (_token_at(self.tokenizer, encoding, row.text, edge) for edge in (start, end))
            marks[first:last] = [number] * (last - first)
            as_served &= self._is_served(row.text, encoding, start, first)
        if not as_served:
            tally.repair("an opening of which a server makes other tokens, as no answer follows: kept", row.record.id)
        return Encoded(row.record, row.turn, ids, marks)

    def _is_served(self, text: str, encoding: Any, start: int, first: int) -> bool:
        """Whether the tokens from the last special one up to an answer are the same where the text ends there.

        Some tokenizers (GPT-2's rule for white space) make one token of two newlines at an end, and two before a word.
        """
        place = first - 1
        while place >= 0 and encoding.ids[place] not in self.special_ids:
            place -= 1
        if place < 0:
            return True  # nothing that is certain to be a token of its own: not looked into
        tail = text[encoding.token_to_chars(place)[0] : start]
        if len(tail) > LONGEST_OPENING:
            return True
        if tail not in self.openings:
            self.openings[tail] = _encodings(self.tokenizer, [tail])[0].ids
        return bool(self.openings[tail] == encoding.ids[place:first])

    def _edges(self, args: Mapping[str, Any]) -> Edges:
        key = sha256_json(args)
        if key not in self.known:
            self.known[key] = edges(self.tokenizer, "assistant", args)
            if not self.known[key].end:
                shown = self.known[key].before + "..." + self.known[key].after
                raise UserError(
                    "the target's chat template ends an answer with ordinary text, not with a marker of its own, so "
                    f"nobody can say where an answer ends. It renders:\n{shown}"
                )
        return self.known[key]


def _inside(written: list[tuple[int, int]], start: int, end: int, marker: str) -> list[tuple[int, int]]:
    """What generation blocks wrote of the answer start..end. A part that reaches the end marker has it."""
    parts = [(max(a, start), min(b, end)) for a, b in written if a < end and b > start]
    if parts and parts[-1][1] >= end - len(marker):
        parts[-1] = (parts[-1][0], end)
    return parts


def _goes_on(past: str, answer: Answer, following: Answer) -> bool:
    """Whether the text of the following answer begins with that of the answer."""
    return (past[answer.past : following.past] + following.text).startswith(answer.text)


def _common(a: str, b: str) -> int:
    """How many characters both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _overlap(opening: str, written: str) -> int:
    """How much of the answer ends the opening already ("<think>\\n", for one), white space at its end left aside."""
    for end in (opening, opening.rstrip()):
        for n in range(min(len(end), len(written), LONGEST_OPENING), 0, -1):
            if end.endswith(written[:n]):
                return n
    return 0


def _token_at(tokenizer: PreTrainedTokenizerBase, encoding: Any, text: str, edge: int) -> int:
    """Index of the first token at or after a character; refused when a token stands on both sides of it."""
    at = edge
    while at < len(text) and encoding.char_to_token(at) is None:
        at += 1
    if at == len(text):
        return len(encoding.ids)
    token: int = encoding.char_to_token(at)
    start, stop = encoding.token_to_chars(token)
    before = encoding.token_to_chars(token - 1)[1] if token else 0
    gap = text[before:start]
    # some tokenizers leave the leading space of a token out of its characters
    if gap and gap.isspace() and len(tokenizer.decode([encoding.ids[token]])) > stop - start:
        start = before
    if start < edge:
        raise Refused("a token on both sides of the edge of an answer", f"{text[start:stop]!r} in\n{_show(text)}")
    return token


def _encodings(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[Any]:
    if not texts:
        return []
    options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    encodings: list[Any] = tokenizer(texts, **options).encodings
    return encodings


def _holds(shown: str, words: str) -> bool:
    """Whether the words are there; templates move the white space around them."""
    return _squeezed(words) in _squeezed(shown)


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _show(text: str) -> str:
    """A rendered conversation for a message of one screen."""
    cut = text if len(text) <= SCREEN else f"{text[: SCREEN // 2]}\n[...]\n{text[-SCREEN // 2 :]}"
    return f"Rendered conversation:\n{cut}"
