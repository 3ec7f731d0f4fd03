"""What rows of every schema become, by which rule a row is mended, and why one is refused."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.schemas import Conversation, Record, Rendered, Tokenised, read_row, to_record
from data_prep.tally import Refused

Q, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
S = {"role": "system", "content": "s"}
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "the sea"}}}


def read(row: Any, column: str = "") -> tuple[Record, str, list[str]]:
    mended: list[str] = []
    record, schema = read_row(row, "id-1", "talk", mended.append, column)
    return record, schema, mended


def talk(*messages: dict[str, Any], **more: Any) -> Conversation:
    return Conversation("id-1", list(messages), "talk", **more)


@pytest.mark.parametrize(
    ("row", "schema", "record"),
    [
        ({"messages": [S, Q, A]}, "messages", talk(S, Q, A)),
        ({"messages": [{"role": "developer", "content": "s"}, Q]}, "messages", talk(S, Q)),
        ({"messages": json.dumps([Q, A])}, "messages", talk(Q, A)),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, A]}, "messages", talk(Q, A)),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"},
            "ShareGPT",
            talk(S, Q, A),
        ),
        ({"turns": ["q", "q"], "system": "s"}, "turns", talk(S, Q, Q)),
        ({"prompt": "q", "response": "a"}, "prompt/response", talk(Q, A)),
        ({"prompt": "q"}, "prompt", talk(Q)),
        ({"question": "q", "answer": "a", "other": 1}, "question/answer", talk(Q, A)),
        ({"prompt": [Q], "completion": [A]}, "prompt/completion", talk(Q, A)),
        ({"instruction": "q", "output": "a"}, "Alpaca", talk(Q, A)),
        ({"instruction": "q", "input": "", "output": "a"}, "Alpaca", talk(Q, A)),
        (
            {"instruction": "q", "input": "x", "output": "a"},
            "Alpaca",
            talk({"role": "user", "content": "q\n\nx"}, A),
        ),
        ({"text": "<s>user\nq</s>"}, "text", Rendered("id-1", "<s>user\nq</s>", "talk")),
        ({"input_ids": [5, 6], "labels": [-100, 6]}, "input_ids", Tokenised("id-1", [5, 6], [0, 1], "talk")),
        ({"input_ids": [5, 6, 7], "mask": [1, 0, 1]}, "input_ids", Tokenised("id-1", [5, 6, 7], [1, 0, 2], "talk")),
        ({"input_ids": [5, 6], "marks": [3, 2]}, "input_ids", Tokenised("id-1", [5, 6], [3, 2], "talk")),
        (
            {"messages": [Q, A], "chat_template_kwargs": {"enable_thinking": False}},
            "messages",
            talk(Q, A, template_args={"enable_thinking": False}),
        ),
        (
            {"messages": [Q, {"role": "assistant", "content": "a", "reasoning_content": "r"}]},
            "messages",
            talk(Q, {**A, "reasoning_content": "r"}),
        ),
    ],
)  # fmt: skip
def test_every_schema(row: dict[str, Any], schema: str, record: Record) -> None:
    assert read(row) == (record, schema, [])
    assert read({**row, "tools": None, "category": None})[0] == record  # as Arrow writes keys that a row has not


def test_tools_and_their_calls_arrive_as_templates_want_them() -> None:
    wire = {**CALL, "function": {"name": "look", "arguments": '{"at": "the sea"}'}}
    said = [Q, {"role": "assistant", "content": None, "tool_calls": [wire]}, {"role": "function", "content": "blue"}, A]
    tool = {"type": "function", "function": {"name": "look"}}
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    expected = talk(Q, called, {"role": "tool", "content": "blue"}, A, tools=[tool])
    for tools in ([tool], json.dumps([tool])):
        record = read({"messages": said, "tools": tools})[0]
        assert record == expected
    assert expected.kept == [called, A] and expected.arguments({"x": 1}) == {"x": 1, "tools": [tool]}


def test_one_column_of_many() -> None:
    row = {"first": "q", "chat": [Q, A], "text": "whole", "category": "c"}
    assert read(row, "first")[0] == Conversation("id-1", [Q], "c")
    assert read(row, "chat")[0] == Conversation("id-1", [Q, A], "c")
    assert read(row, "text")[0] == Rendered("id-1", "whole", "c")
    with pytest.raises(Refused, match="keys found: first, chat, text, category"):
        read(row, "missing")


@pytest.mark.parametrize(
    ("said", "expected", "rule"),
    [
        ([Q, Q, A], [{"role": "user", "content": "q\n\nq"}, A], "user turns in a row"),
        ([Q, A, {"role": "user", "content": " "}, A], [Q, A], "an empty turn: the conversation ends before it"),
        ([Q, {"role": "assistant", "content": ""}], [Q], "an empty turn: the conversation ends before it"),
        ([S, A, Q, A], [S, Q, A], "an answer before any question: left out"),
    ],
)
def test_what_is_mended_and_by_which_rule(said: list[Any], expected: list[Any], rule: str) -> None:
    record, _, mended = read({"messages": said})
    assert isinstance(record, Conversation) and record.messages == expected
    assert len(mended) == 1 and rule in mended[0]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([1, 2], "not a JSON object"),
        ({"foo": 1, "bar": 2}, "unknown schema"),
        ({}, "unknown schema"),
        ({"messages": []}, "is no list of turns"),
        ({"messages": "hello"}, "is no list of turns"),
        ({"messages": [Q, "x"]}, "is no list of turns"),
        ({"messages": [Q, {"role": "wizard", "content": "x"}]}, "unknown role 'wizard'"),
        ({"messages": [Q, A, A]}, "an assistant turn out of place"),
        ({"messages": [Q, S, A]}, "a system turn out of place"),
        ({"messages": [Q, {"role": "tool", "content": "x"}]}, "a tool turn out of place"),
        ({"messages": [{"role": "user", "content": 3}]}, "content that is not text"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}, "content that is not text"),
        ({"messages": [S]}, "no question in it"),
        ({"messages": [{"role": "user", "content": " "}, A]}, "no question in it"),
        ({"turns": ["q", ""]}, "an empty turn"),
        ({"prompt": 7}, "content that is not text"),
        ({"messages": [Q, {"role": "assistant", "content": "", "tool_calls": [{"x": 1}]}]}, "a malformed tool call"),
        ({"prompt": "q", "tools": "none"}, "'tools' or 'template_args' is malformed"),
        ({"prompt": "q", "template_args": [1]}, "'tools' or 'template_args' is malformed"),
        ({"prompt": "q", "id": [1]}, "'id' or 'category' is no text"),
        ({"prompt": "half \ud83d a pair"}, "half a surrogate pair"),
        ({"text": "  "}, "'text' is no text"),
        ({"input_ids": [1, 2]}, "'input_ids' without a mask"),
        ({"input_ids": [1, 2], "mask": [1]}, "differ in length"),
        ({"input_ids": [1, 2], "mask": [0, 0]}, "marks no answer"),
        ({"input_ids": [1, -2], "mask": [0, 1]}, "marks no answer, or a number is out of range"),
        ({"input_ids": [1, 2.5], "mask": [0, 1]}, "is no list of integers"),
        ({"input_ids": [1, 2], "labels": [-100, 3]}, "'labels' that are not the tokens"),
    ],
)
def test_what_is_refused_and_why(row: Any, reason: str) -> None:
    with pytest.raises(Refused) as refusal:
        read(row)
    assert reason in refusal.value.reason


def test_an_unknown_schema_shows_the_keys_that_were_seen() -> None:
    with pytest.raises(Refused, match=r"keys with a value: foo, bar\. Known schemas: messages, ShareGPT"):
        read({"foo": 1, "bar": 2, "empty": None})


text = st.text('ab é日🙂\n\u2028{["', min_size=1, max_size=8).filter(lambda t: t.strip() != "")
ids = st.lists(st.integers(0, 99), min_size=1, max_size=6)


@st.composite
def records(draw: st.DrawFn) -> Record:
    name, category = draw(text), draw(text)
    kind = draw(st.sampled_from(["text", "ids", "asked", "answered"]))
    if kind == "text":
        return Rendered(name, draw(text), category)
    if kind == "ids":
        tokens = draw(ids)
        return Tokenised(name, tokens, [0, *range(1, len(tokens))] if len(tokens) > 1 else [1], category)
    messages = [{"role": "system", "content": draw(text)}] * draw(st.integers(0, 1))
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(text)})
        if kind == "answered":
            messages.append({"role": "assistant", "content": draw(text)})
    more: dict[str, Any] = draw(
        st.sampled_from([{}, {"tools": [CALL]}, {"template_args": {"x": 1}}, {"reference": ["r"]}])
    )
    return Conversation(name, messages, category, **more)


@given(records())
def test_a_record_is_written_and_read_back(record: Record) -> None:
    line = json.loads(json.dumps(to_record(record)))
    assert read_row(line, "other", "other", lambda rule: pytest.fail(rule))[0] == record
