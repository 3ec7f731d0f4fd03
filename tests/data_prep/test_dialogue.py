"""A dialogue on its way to rows: turns in order, room, fates, and templates that rewrite the past."""

from typing import Any

import pytest

from data_prep.dialogue import Dialogue, Terms
from data_prep.prompts import Prompt
from data_prep.schemas import Conversation

# shows an answer without its reasoning once a turn follows, as Qwen3's and DeepSeek-R1's templates do
FORGETFUL = (
    "{% for m in messages %}{% if m['role'] == 'assistant' and not loop.last %}"
    "{{ '<s>assistant\n' + m['content'].split('!')[-1] + '</s>\n' }}"
    "{% else %}{{ '<s>' + m['role'] + '\n' + m['content'] + '</s>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)


@pytest.fixture
def terms(tokenizer: Any) -> Terms:
    return Terms(tokenizer, {}, frozenset({1}), max_length=100, answer_tokens=20)


def spoken(terms: Terms, text: str) -> list[int]:
    return [*terms.tokenizer(text)["input_ids"], 1]


def ask(terms: Terms, *turns: str, system: str | None = None) -> Dialogue:
    return Dialogue(terms, "s", Prompt("a", list(turns), system=system).conversation(), 0.0)


def test_turns_follow_each_other(terms: Terms) -> None:
    """The second question is the template's text behind the very tokens of the first answer."""
    dialogue = ask(terms, "a b", "c", system="be kind")
    odd = [*terms.tokenizer("f")["input_ids"], *terms.tokenizer("ox")["input_ids"], 1]  # not how "fox" is tokenised
    assert dialogue.ask() and dialogue.turn == 0
    dialogue.take(odd)
    assert dialogue.ask() and dialogue.turn == 1
    dialogue.take([7, 1])
    assert not dialogue.ask()
    [((ids, marks), meta)] = dialogue.rows()
    expected = "<s>system\nbe kind</s>\n<s>user\na b</s>\n<s>assistant\nfox</s>\n<s>user\nc</s>\n<s>assistant\n"
    assert terms.tokenizer.decode(ids[:-2]) == expected
    assert [t for t, m in zip(ids, marks, strict=True) if m == 1] == odd
    assert [t for t, m in zip(ids, marks, strict=True) if m == 2] == [7, 1]
    assert (meta["fate"], meta["turn"], dialogue.left_out) == ("ended", 0, 0)


def test_a_template_that_rewrites_the_past_gives_a_row_for_each_answer(terms: Terms) -> None:
    terms.tokenizer.chat_template = FORGETFUL
    dialogue = ask(terms, "a", "b", "c")
    for words in ("hm!one", "two", "well!three"):
        assert dialogue.ask()
        dialogue.take(spoken(terms, words))
    assert not dialogue.ask()
    rows = dialogue.rows()
    seen = [terms.tokenizer.decode(ids) for (ids, _), _ in rows]
    first = "<s>user\na</s>\n<s>assistant\n"
    # the second answer is shown unchanged, so the third stands behind it in one row
    whole = first + "one</s>\n<s>user\nb</s>\n<s>assistant\ntwo</s>\n<s>user\nc</s>\n<s>assistant\nwell!three</s>"
    assert seen == [first + "hm!one</s>", whole]
    assert [sorted(set(marks)) for (_, marks), _ in rows] == [[0, 1], [0, 1, 2]]
    told = [terms.tokenizer.decode([t for t, m in zip(*row, strict=True) if m == 1]) for row, _ in rows]
    assert told == ["hm!one</s>", "two</s>"]
    assert [meta["turn"] for _, meta in rows] == [1, 3]


@pytest.mark.parametrize(
    ("words", "answer", "fate", "rows"),
    [
        (1, [5, 6, 1], "ended", 1),
        (1, [5] * 20, "truncated", 1),
        (70, [5] * 20, "cut", 1),
        (1, [1], "empty", 0),
        (1, None, "failed", 0),
    ],
)
def test_what_becomes_of_an_answer(terms: Terms, words: int, answer: list[int] | None, fate: str, rows: int) -> None:
    dialogue = ask(terms, "x " * words)
    assert dialogue.ask()
    dialogue.take(None if answer is None else answer[: dialogue.budget], "server gone")
    assert (dialogue.fate, len(dialogue.rows())) == (fate, rows)
    assert not dialogue.ask() and all(len(ids) <= 100 for (ids, _), _ in dialogue.rows())


def test_no_room_and_refused_by_the_template(terms: Terms) -> None:
    long = ask(terms, "x " * 100)
    assert not long.ask() and long.fate == "no_room" and long.rows() == []
    terms.tokenizer.chat_template = "{{ raise_exception('no system turns') }}"
    refused = ask(terms, "a")
    assert not refused.ask() and refused.fate == "refused" and "no system turns" in refused.why


def test_turns_that_get_no_answer_leave_the_earlier_ones(terms: Terms) -> None:
    failed = ask(terms, "a", "b")
    assert failed.ask()
    failed.take(spoken(terms, "fox"))
    assert failed.ask()
    failed.take(None, "server gone")
    crowded = ask(terms, "a", "x " * 100)
    assert crowded.ask()
    crowded.take(spoken(terms, "fox"))
    assert not crowded.ask()
    for dialogue in (failed, crowded):
        [((ids, marks), meta)] = dialogue.rows()
        assert terms.tokenizer.decode(ids) == "<s>user\na</s>\n<s>assistant\nfox</s>" and marks[-1] == 1
        assert meta["fate"] == "ended" and dialogue.left_out == 1


def test_a_kept_tool_call_is_context_and_not_asked_again(terms: Terms) -> None:
    terms.tokenizer.chat_template = terms.tokenizer.chat_template.replace(
        "m['content']", "(m['content'] or m['tool_calls'][0]['name'])"
    )
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "sum"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "old"},
    ]
    dialogue = Dialogue(terms, "s", Conversation("a", messages), 0.0)
    assert dialogue.ask()
    dialogue.take(spoken(terms, "new"))
    assert not dialogue.ask()
    [((ids, marks), _)] = dialogue.rows()
    expected = "<s>user\nsum</s>\n<s>assistant\nadd</s>\n<s>tool\n3</s>\n<s>assistant\nnew</s>"
    assert terms.tokenizer.decode(ids) == expected
    assert terms.tokenizer.decode([t for t, m in zip(ids, marks, strict=True) if m]) == "new</s>"


def test_loops_are_marked(terms: Terms) -> None:
    dialogue = ask(terms, "a")
    assert dialogue.ask()
    dialogue.take([5, 6] * 10)
    assert not dialogue.rows()[0][1]["loop"]
    longer = Dialogue(Terms(terms.tokenizer, {}, frozenset({1}), 100, 40), "s", dialogue.conversation, 0.0)
    assert longer.ask()
    longer.take([5, 6] * 12)
    assert longer.rows()[0][1]["loop"]
