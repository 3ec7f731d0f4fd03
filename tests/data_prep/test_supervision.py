"""The supervision contract, against its wording, and the spans of written conversations, against three templates."""

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_prep.supervision import encode_conversation, encode_generated, supervised
from recipes.schema import UserError
from tests.tiny import TEMPLATE

INST = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] | trim + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ m['content'] | trim + eos_token }}{% endif %}{% endfor %}"
)
HEADERS = (
    "{% if messages[0]['role'] != 'system' %}{{ '<s>[system]\n\nBe kind.</s>' }}{% endif %}"
    "{% for m in messages %}{{ '<s>[' + m['role'] + ']\n\n' + m['content'] | trim + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>[assistant]\n\n' }}{% endif %}"
)
DROPS_PAST = (
    "{% for m in messages %}{{ '<s>' + m['role'] + '\n' }}{% if loop.last or m['role'] == 'user' %}{{ m['content'] }}"
    "{% endif %}{{ '</s>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)


def slow_supervised(answer: list[int], steps: int) -> list[list[bool]]:
    """Word for word: slot p is supervised at step i iff x[p+1 .. p+2+i] exist and all lie in the same answer."""
    out = []
    for i in range(steps):
        line = []
        for p in range(len(answer)):
            needed = range(p + 1, p + 2 + i + 1)
            inside = needed[-1] < len(answer)
            line.append(inside and answer[p + 1] != 0 and all(answer[q] == answer[p + 1] for q in needed))
        out.append(line)
    return out


def test_supervised_hand_made_dialogue() -> None:
    # x:               user user  A   A   A  end user user
    answer = torch.tensor([0, 0, 1, 1, 1, 1, 0, 0])
    slots = supervised(answer, 4)
    # the first useful slot is the last of the prompt; the last predicts the end token
    assert [s.nonzero().flatten().tolist() for s in slots] == [[1, 2, 3], [1, 2], [1], []]


def test_supervised_exhaustively() -> None:
    for length in range(1, 8):
        for answer in product((0, 1, 2), repeat=length):
            assert supervised(torch.tensor(answer), 4).tolist() == slow_supervised(list(answer), 4)


def test_supervised_batch_is_its_rows_and_nested() -> None:
    answer = torch.randint(0, 3, (5, 40), generator=torch.Generator().manual_seed(0)).repeat_interleave(3, dim=1)
    slots = supervised(answer, 7)
    assert slots.shape == (7, 5, 120)
    for b in range(5):
        assert torch.equal(slots[:, b], supervised(answer[b], 7))
    assert not (slots[1:] & ~slots[:-1]).any()


def test_encode_generated_keeps_the_tokens() -> None:
    ids, marks = encode_generated([5, 6], [7, 8, 1])
    assert (ids, marks) == ([5, 6, 7, 8, 1], [0, 0, 1, 1, 1])
    assert encode_generated([*ids, 9], [3, 1], [*marks, 0]) == ([*ids, 9, 3, 1], [*marks, 0, 2, 2])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), template=st.sampled_from([TEMPLATE, INST, HEADERS]))
def test_supervised_text_is_the_assistants_text_and_its_end(tokenizer: Any, data: st.DataObject, template: str) -> None:
    tokenizer.chat_template = template
    word = st.text("abc xyz,.é\n日🙂", min_size=1, max_size=12).filter(lambda t: t.strip() == t and t != "")
    turns = data.draw(st.lists(st.tuples(word, word), min_size=1, max_size=3))
    messages = []
    for question, answer in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    ids, marks = encode_conversation(tokenizer, messages, {})
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(messages, tokenize=False)
    for k, (_, answer) in enumerate(turns, start=1):
        assert tokenizer.decode([t for t, m in zip(ids, marks, strict=True) if m == k]) == answer + "</s>"


def test_a_template_that_rewrites_the_past_is_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = DROPS_PAST
    messages = [{"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    assert encode_conversation(tokenizer, messages[:2], {})[1].count(1) == 2
    with pytest.raises(UserError, match=r"(?s)rendered otherwise.*Rendered conversation:\n<s>user"):
        encode_conversation(tokenizer, messages, {})


def test_a_token_on_both_sides_of_an_edge_is_refused(tokenizer: Any) -> None:
    # the training text has " fox", so the space of the generation prompt and the answer's first word become one token
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '</s>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "fox"}]
    assert " fox" in [tokenizer.decode([i]) for i in tokenizer("a: fox")["input_ids"]]
    with pytest.raises(UserError, match=r"(?s)' fox' stands on both sides.*user: a</s>assistant: fox</s>"):
        encode_conversation(tokenizer, messages, {})


def test_an_answer_that_no_token_ends_is_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<s>' + m['role'] + '\n' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
    )
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(UserError, match="ordinary text"):
        encode_conversation(tokenizer, messages, {})
