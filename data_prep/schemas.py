"""What a row of somebody's data says: a conversation, text that is rendered already, or tokens."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from data_prep.tally import Refused
from data_prep.template import Message
from recipes.files import sha256_json

EXAMPLE = '{"id": "a", "turns": ["Hi"]}'
KNOWN = "messages, ShareGPT conversations, turns, prompt/response, Alpaca (instruction, input, output), text, input_ids"
# the roles that are known by other names too
ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {
    "developer": "system",
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "function": "tool",
    "observation": "tool",
}
WITH_ARTICLE = {"system": "a system", "assistant": "an assistant", "tool": "a tool"}
QUESTIONS = ("prompt", "question", "query")
ANSWERS = ("response", "completion", "answer")
MASKS = ("marks", "labels", "assistant_masks", "assistant_mask", "answer_mask", "loss_mask", "completion_mask", "mask")
EMPTY = "an empty turn"
MOST_ANSWERS = 255  # a mark is one byte on disk


@dataclass(frozen=True)
class Conversation:
    """Turns in order. An answer is due after each user turn and after each run of tool results.

    Where an assistant turn follows, it is the kept answer; where another user turn follows or nothing, there is none.
    """

    id: str
    messages: list[Message]  # system? then user, assistant (content, reasoning_content?, tool_calls?) and tool turns
    category: str = ""
    tools: list[dict[str, Any]] = field(default_factory=list)
    template_args: dict[str, Any] = field(default_factory=dict)  # of this row, laid over the recipe's
    reference: list[Any] = field(default_factory=list)

    @property
    def kept(self) -> list[Message | None]:
        """The answer that stands in each place where one is due, or None."""
        return [self.messages[i] if self._is_answer(i) else None for i in self._due()]

    def asked(self, answers: Sequence[Message]) -> list[Message]:
        """What the target is shown when its next answer is due, with `answers` in the place of the earlier ones."""
        due = self._due()
        assert len(answers) < len(due), "every answer is there already"
        out: list[Message] = []
        start = 0
        for place, answer in zip(due, answers, strict=False):
            out += [*self.messages[start:place], answer]
            start = place + self._is_answer(place)
        return out + self.messages[start : due[len(answers)]]

    def arguments(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """What the chat template is given besides the messages: the recipe's arguments, the row's, and the tools."""
        return {**args, **self.template_args, **({"tools": self.tools} if self.tools else {})}

    @property
    def key(self) -> str:
        """Hash of what is asked: equal for equal questions, whatever they are called and however they were answered."""
        first = self.messages[0]
        system = first["content"] if first["role"] == "system" else None
        said = [m for m in self.messages if m["role"] in ("user", "tool")]
        if not self.tools and all(m["role"] == "user" for m in said):
            return sha256_json([system, [m["content"] for m in said]])
        return sha256_json([system, said, self.tools])

    def _due(self) -> list[int]:
        """Indices in `messages` at which an answer stands or is missing."""
        roles = [m["role"] for m in self.messages]
        return [
            i + 1
            for i, role in enumerate(roles)
            if role == "user" or (role == "tool" and (i + 1 == len(roles) or roles[i + 1] != "tool"))
        ]

    def _is_answer(self, place: int) -> bool:
        return place < len(self.messages) and self.messages[place]["role"] == "assistant"


@dataclass(frozen=True)
class Rendered:
    """Text that a chat template has written already. It is trained on as it is: its answers are always kept."""

    id: str
    text: str
    category: str = ""


@dataclass(frozen=True)
class Tokenised:
    """Tokens of the target's own tokenizer with their answers marked. Kept as they are."""

    id: str
    ids: list[int]
    marks: list[int]  # 0 = not an answer, k = k-th answer
    category: str = ""


Record = Conversation | Rendered | Tokenised


def to_record(record: Record) -> dict[str, Any]:
    """A JSON object that `read_row` reads back."""
    values = {f.name: getattr(record, f.name) for f in fields(record)}
    if isinstance(record, Conversation) and all(m["role"] in ("system", "user") for m in record.messages):
        said = values.pop("messages")
        values["turns"] = [m["content"] for m in said if m["role"] == "user"]
        values["system"] = said[0]["content"] if said[0]["role"] == "system" else None
    if isinstance(record, Tokenised):
        values["input_ids"] = values.pop("ids")
    return {key: value for key, value in values.items() if value not in (None, [], {}, "")}


def read_row(
    value: Any, default_id: str, default_category: str, mended: Callable[[str], None], column: str = ""
) -> tuple[Record, str]:
    """One row of a file or dataset, and the name of the schema that its keys show. `column`: look at that key alone.

    Every rule by which a row is repaired is told to `mended`; a row that no rule repairs raises Refused.
    """
    if not isinstance(value, Mapping):
        raise Refused("not a JSON object", f"a row is an object such as {EXAMPLE}, not {value!r:.80}")
    _check_text(value)
    row = {str(k): v for k, v in value.items() if v is not None}
    name = str(row.get("id", row.get("prompt_id", default_id)))
    category = row.get("category", default_category)
    if not name.strip() or not isinstance(row.get("id", ""), str | int) or not isinstance(category, str):
        raise Refused("'id' or 'category' is no text", f"id {row.get('id')!r:.80}, category {category!r:.80}")
    schema, found = _detect(row, column)
    if schema == "input_ids":
        return Tokenised(name, *_tokens(row), category), schema
    if schema == "text":
        if not isinstance(found, str) or not found.strip():
            raise Refused("'text' is no text", repr(found)[:80])
        return Rendered(name, found, category), schema
    if "system" in row and not (found and found[0].get("role") == "system"):
        found = [{"role": "system", "content": row["system"]}, *found]
    # the question file's own form: its user turns follow each other because none is answered yet
    turns = mend(found, mended, answered=schema != "turns")
    reference = row.get("reference", [])
    if not isinstance(reference, list):
        raise Refused("'reference' is no list", repr(reference)[:80])
    args = _parsed(row.get("template_args", row.get("chat_template_kwargs", {})))
    tools = _parsed(row.get("tools", []))
    if not isinstance(args, dict) or not isinstance(tools, list) or not all(isinstance(t, dict) for t in tools):
        raise Refused("'tools' or 'template_args' is malformed", f"tools {tools!r:.80}, template_args {args!r:.80}")
    return Conversation(name, turns, category, tools, args, reference), schema


def mend(said: Sequence[Mapping[str, Any]], mended: Callable[[str], None], answered: bool = True) -> list[Message]:
    """The turns in the order that every chat template expects: system?, then user, answer, user, ...

    `answered`: user turns that follow each other are one turn (else: turns whose answers are still to come).
    """
    turns = [_message(m) for m in said]
    empty = [i for i, m in enumerate(turns) if _is_empty(m)]
    if empty and not answered:
        raise Refused(EMPTY, f"every turn must be a string with text in it: turn {empty[0] + 1} is empty")
    if empty:
        turns = turns[: empty[0]]
        mended(f"{EMPTY}: the conversation ends before it")
    out: list[Message] = []
    for number, turn in enumerate(turns, start=1):
        role, before = turn["role"], out[-1]["role"] if out else ""
        if role == "assistant" and before in ("", "system"):
            mended("an answer before any question: left out")
        elif role == before == "user" and answered:
            out[-1] = {**out[-1], "content": f"{out[-1]['content']}\n\n{turn['content']}"}
            mended("user turns in a row: joined by a blank line")
        elif (
            (role == "system" and before)
            or (role == before == "assistant")
            or (role == "tool" and before not in ("assistant", "tool"))
        ):
            raise Refused(
                f"{WITH_ARTICLE[role]} turn out of place",
                f"turn {number} of {len(turns)} follows {before or 'nothing'}",
            )
        else:
            out.append(turn)
    if not any(m["role"] == "user" for m in out):
        raise Refused("no question in it")
    return out


def _message(said: Mapping[str, Any]) -> Message:
    """One turn with a known role and its text as one string; what else it holds is left for the chat template."""
    if not isinstance(said, Mapping):
        raise Refused("a turn that is no object", repr(said)[:80])
    said = {k: v for k, v in said.items() if v is not None}
    role = said.get("role", said.get("from"))
    content = said.get("content", said.get("value", ""))
    if not isinstance(role, str) or role not in ROLES:
        raise Refused(f"unknown role {role!r:.40}", f"known: {', '.join(ROLES)}")
    if isinstance(content, list):
        parts = [p.get("text") if isinstance(p, Mapping) else p for p in content]
        texts = [p for p in parts if isinstance(p, str)]
        content = "".join(texts) if len(texts) == len(parts) else content
    if not isinstance(content, str):
        raise Refused("content that is not text", f"a turn must be a string with text in it, not {content!r:.80}")
    rest = {k: v for k, v in said.items() if k not in ("role", "from", "content", "value")}
    if "tool_calls" in rest:
        rest["tool_calls"] = [_call(c) for c in _listed(rest["tool_calls"])]
        if not rest["tool_calls"]:
            del rest["tool_calls"]
    return {"role": ROLES[role], "content": content, **rest}


def _call(call: Any) -> Any:
    """A tool call whose arguments, a string of JSON on the wire, are an object, as servers give them to templates."""
    inner = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        raise Refused("a malformed tool call", repr(call)[:80])
    arguments = {"arguments": _parsed(inner["arguments"])} if "arguments" in inner else {}
    return {**call, "function": {**inner, **arguments}} if "function" in call else {**call, **arguments}


def _is_empty(turn: Message) -> bool:
    return turn["role"] in ("user", "assistant") and not turn["content"].strip() and "tool_calls" not in turn


def _detect(row: dict[str, Any], column: str) -> tuple[str, Any]:
    """(schema, what stands under its keys); a conversation as a list of turns."""
    if column:
        if column not in row:
            raise Refused(f"no column {column!r}", f"keys found: {', '.join(row)}")
        cell = row[column]
        if column not in ("text", "input_ids"):
            chat = isinstance(_parsed(cell), list)
            return _detect({"turns" if chat else "prompt": cell}, "")
    for key in ("input_ids", "text") if column else ("input_ids",):
        if key in row:
            return key, row[key]
    for key in ("messages", "conversations", "conversation", "turns"):
        if key in row:
            turns = _listed(row[key])
            if turns and all(isinstance(t, str) for t in turns):
                return "turns", [{"role": "user", "content": t} for t in turns]
            if not turns or not all(isinstance(t, Mapping) for t in turns):
                raise Refused(f"{key!r} is no list of turns", f"at least one string or turn, not {row[key]!r:.80}")
            return "ShareGPT" if "from" in turns[0] else "messages", turns
    for key in QUESTIONS:
        if key in row:
            answer = next((a for a in ANSWERS if a in row), "")
            return key + (f"/{answer}" if answer else ""), _pair(row[key], row.get(answer))
    if "instruction" in row:
        more = row.get("input", "")
        question = f"{row['instruction']}\n\n{more}" if isinstance(more, str) and more.strip() else row["instruction"]
        return "Alpaca", _pair(question, row.get("output"))
    if "text" in row:
        return "text", row["text"]
    raise Refused("unknown schema", f"keys with a value: {', '.join(row) or 'none'}. Known schemas: {KNOWN}")


def _pair(question: Any, answer: Any) -> list[Any]:
    """Turns of a question and perhaps its answer; each is text or a list of turns already."""
    asked = list(question) if isinstance(question, list) else [{"role": "user", "content": question}]
    if answer is None:
        return asked
    return asked + (list(answer) if isinstance(answer, list) else [{"role": "assistant", "content": answer}])


def _tokens(row: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Ids and marks: from `labels` (-100 = not supervised) or from a mask of 0 and 1 (or answer numbers)."""
    ids = row["input_ids"]
    key = next((k for k in MASKS if k in row), "")
    if not key:
        raise Refused("'input_ids' without a mask", f"keys found: {', '.join(row)}. Known masks: {', '.join(MASKS)}")
    mask = row[key]
    for name, values in (("input_ids", ids), (key, mask)):
        if not isinstance(values, list) or not all(isinstance(v, int) for v in values):
            raise Refused(f"{name!r} is no list of integers", repr(values)[:80])
    if len(ids) != len(mask):
        raise Refused(f"'input_ids' and {key!r} differ in length", f"{len(ids)} and {len(mask)}")
    if key == "labels":
        if any(label not in (-100, token) for token, label in zip(ids, mask, strict=True)):
            raise Refused("'labels' that are not the tokens", "each must be -100 or equal to the token at its place")
        mask = [int(label != -100) for label in mask]
    if not any(mask) or min(mask) < 0 or max(mask) > MOST_ANSWERS or min(ids) < 0:
        raise Refused(f"{key!r} marks no answer, or a number is out of range")
    if max(mask) > 1:
        return ids, mask
    return ids, _numbered(mask)


def _numbered(mask: list[int]) -> list[int]:
    """[0, 1, 1, 0, 1] -> [0, 1, 1, 0, 2]"""
    number, marks = 0, []
    for i, marked in enumerate(mask):
        number += bool(marked and not (i and mask[i - 1]))
        marks.append(number if marked else 0)
    return marks


def _check_text(value: Any) -> None:
    """Refuse half a surrogate pair anywhere: JSON can spell it, and no tokenizer takes it."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise Refused("half a surrogate pair, which is no text", repr(value)[:80]) from error
    elif isinstance(value, Mapping):
        for inner in value.values():
            _check_text(inner)
    elif isinstance(value, list) and value and not isinstance(value[0], int):
        for inner in value:
            _check_text(inner)


def _listed(value: Any) -> list[Any]:
    found = _parsed(value)
    return found if isinstance(found, list) else []


def _parsed(value: Any) -> Any:
    """What a string of JSON holds; anything else as it is."""
    if isinstance(value, str) and value.strip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value
