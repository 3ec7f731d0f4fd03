"""Conversations followed turn by turn, against each of their beginnings rendered on its own."""

import copy
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from data_prep import encode, turns
from data_prep.tally import Tally
from data_prep.template import Message, render_all
from data_prep.turns import Course, follow
from tests.data_prep.styles import STYLES
from tests.data_prep.test_encode import chat, dialogues, styled

REACH = 9  # characters before an opening that are asked for
LOOP = "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '</s>' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
PLAIN = LOOP + "{% endfor %}" + PROMPT

# pieces of templates, and whether one that is made of them can be followed
HEADS = {
    "": True,
    "{% set ns = namespace(n=0, last='') %}": True,
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = m.content %}{% endfor %}{{ ns.n }}": False,
    "{% if messages[0].role == 'system' %}{% set messages = messages[1:] %}{% endif %}": True,
    "{% set count = messages | length %}": False,
    "{% set final = messages[-1] %}{{ final.role }}": False,
    "{% macro turn(m) %}{{ m.content }}{% endmacro %}{{ turn(messages[0]) }}": True,
    "{{ messages[2].content if messages[2] }}": False,
    "{% if messages[1:] %}{{ messages[1:][0].role }}{% endif %}": False,
    "{% if messages == [{'role': 'user', 'content': 'b'}] %}alone{% endif %}": False,
    "{% if messages | string | length > 200 %}long{% endif %}": False,
    "{% set ask = messages | selectattr('role', 'equalto', 'user') | list %}{{ ask[-1].content }}": False,
}
OVER = ["messages", "messages[1:]", "messages | list", "messages[:-1]", "(messages if messages[1:] else [])"]
BODIES = {
    "{{ '<' + m.role + '>' + m.content + '</s>' }}": True,
    "{{ m.content.split('b')[-1] }}": True,
    "{% set ns.n = (ns.n or 0) + 1 %}{{ ns.n }}": True,
    "{% if loop.last and add_generation_prompt %}{{ '<assistant>' }}{% endif %}": True,
    "{% if not loop.last %}{{ '<next>' }}{% endif %}": True,
    "{% if loop.last %}{{ m.content }}{% endif %}": False,
    "{% if loop.last and ns.n %}!{% endif %}": False,
    "{% if loop.last %}{{ loop.index }}{% endif %}": False,
    "{% if m.role == 'tool' and loop.last %}!{% endif %}": True,
    "{% if add_generation_prompt %}{{ m.role }}{% endif %}": False,
    "{{ loop.index }}": True,
    "{{ loop.revindex }}": False,
    "{% if loop.index0 and messages[loop.index0 - 1].role == m.role %}?{% endif %}": True,
    "{% if messages[loop.index0 + 1] is defined %}+{% endif %}": False,
    "{% if m.content == 'b' %}{% continue %}{% endif %}": False,
    "{% if m.content == 'c' %}{% break %}{% endif %}": False,
    "{% if loop.changed(m.role) %}~{% endif %}": True,
    "{{ loop.previtem.role if loop.previtem }}": True,
    "{{ loop.nextitem.role if loop.nextitem }}": False,
    "{% generation %}{{ m.content }}{% endgeneration %}": True,
    "{% set text %}{{ m.content }}{% for o in messages %}{{ o.role[0] }}{% endfor %}{% endset %}{{ text }}": False,
}
TAILS = {
    "": True,
    PROMPT: True,
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% else %}{{ '<end>' }}{% endif %}": True,
    "{% if add_generation_prompt and ns.n % 2 == 0 %}{{ '<even>' }}{% endif %}": False,
    "{% if messages[-1].role == 'user' and add_generation_prompt %}{{ '<assistant>' }}{% endif %}": False,
    "{{ messages | length }}": False,
    "{% if messages | length == 3 %}{{ '<three>' }}{% endif %}": False,
    "{{ messages[0].content }}": False,
    "{{ turn(messages[-1]) if turn }}": True,
    "{% generation %}{{ '<end>' }}{% endgeneration %}": False,
    "{% for m in messages[1:] %}{{ m.content }}{% endfor %}": False,
    "{% set closing = messages %}{{ closing[-1].content }}": False,
}


def compare(tokenizer: Any, messages: list[Message], args: dict[str, Any]) -> Course | None:
    """What was found, each of its answers checked."""
    course = follow(tokenizer, messages, args)
    for place, message in enumerate(messages):
        if course is None or message["role"] != "assistant" or place <= course.first:
            continue
        [(opening, _)] = render_all(tokenizer, [messages[:place]], args, generation=True)
        [(shown, parts)] = render_all(tokenizer, [messages[: place + 1]], args)
        base, found_opening, found_shown, found = course.answer(place, REACH)
        assert (found_opening, found_shown) == (opening[base:], shown[base:])
        assert course.text[:base] == opening[:base] == shown[:base]
        begin = course.ends[place - 1 - course.first]
        assert [(a + base, b + base) for a, b in found] == [(a, b) for a, b in parts if a >= begin]
        assert base <= max(0, len(course.text[:begin].rstrip()) - REACH)
    return course


@st.composite
def templates(draw: st.DrawFn) -> str:
    bodies = draw(st.lists(st.sampled_from([*BODIES]), min_size=1, max_size=3))
    loop = "{% for m in " + draw(st.sampled_from(OVER)) + " %}" + "".join(bodies) + "{% endfor %}"
    middle = draw(st.sampled_from(["", "", loop]))
    return "".join([draw(st.sampled_from([*HEADS])), middle, loop, draw(st.sampled_from([*TAILS]))])


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    first = draw(st.sampled_from([[], [{"role": "system", "content": "s"}]]))
    said = draw(st.lists(st.sampled_from(["a", "b", "c", "bab", "a long one, of more than nine letters "]), max_size=6))
    pairs = [[{"role": "user", "content": t}, {"role": "assistant", "content": t + t}] for t in ["b", *said]]
    return [*first, *(message for pair in pairs for message in pair)]


def prove(tokenizer: Any, examples: int) -> None:
    followed = 0

    @settings(
        max_examples=examples,
        derandomize=True,  # so that the floor on what was followed is met by the same templates every time
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(template=templates(), messages=conversations())
    def holds(template: str, messages: list[Message]) -> None:
        nonlocal followed
        tokenizer.chat_template = template
        followed += compare(tokenizer, messages, {}) is not None

    holds()
    assert followed > examples / 50


def test_whatever_the_template_does_what_is_found_is_what_a_server_saw(tokenizer: Any) -> None:
    prove(tokenizer, 300)


def test_a_turn_that_the_loop_leaves_early_is_not_taken_for_the_one_that_was_looked_at_before(tokenizer: Any) -> None:
    loop = "{% for m in (messages if messages[1:] else []) %}{{ m.content.split('b')[-1] }}"
    leaves = "{% if m.content == 'b' %}{% continue %}{% endif %}{% if not loop.last %}{{ '<next>' }}{% endif %}"
    tokenizer.chat_template = loop + leaves + "{% endfor %}"
    talk = [("system", "s"), ("user", "b"), ("assistant", "bb"), ("user", "a"), ("assistant", "aa")]
    compare(tokenizer, [{"role": role, "content": content} for role, content in talk], {})


@pytest.mark.slow
def test_ten_thousand_templates(tokenizer: Any) -> None:
    prove(tokenizer, 10_000)


@pytest.mark.parametrize("style", STYLES, ids=lambda s: s.name)
def test_templates_that_leave_the_past_alone_are_followed(tokenizer: Any, style: Any) -> None:
    dressed, found = styled(tokenizer, style), []

    @settings(max_examples=50, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(talk=dialogues(style))
    def holds(talk: Any) -> None:
        if not any(key in m for m in talk.messages for key in turns.REASONING):
            args = talk.arguments(style.args)
            found.append(compare(dressed, talk.messages, args) is not None or len(talk.messages) < 4)

    holds()
    rewrites = style.name.startswith("qwen3") or style.name == "gpt-oss"
    assert all(found) or rewrites


ALONE = [(head, "", PROMPT, follows) for head, follows in HEADS.items()]
ALONE += [("", body, PROMPT, follows) for body, follows in BODIES.items()]
ALONE += [("", "", tail, follows) for tail, follows in TAILS.items()]


@pytest.mark.parametrize(("head", "body", "tail", "follows"), ALONE)
def test_each_habit_of_a_template_is_followed_or_not(
    tokenizer: Any, head: str, body: str, tail: str, follows: bool
) -> None:
    tokenizer.chat_template = "{% set ns = namespace(n=0) %}" + head + LOOP + body + "{% endfor %}" + tail
    talk = chat("b", "a", "c", "b", "b" * 300, "b", "a", "b").messages
    assert (compare(tokenizer, talk, {}) is not None) == follows


def test_the_number_of_renderings_does_not_grow_with_the_turns(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[int] = []

    def counting(tokenizer: Any, conversations: Any, *args: Any, **more: Any) -> Any:
        rendered.append(sum(map(len, conversations)))
        return render_all(tokenizer, conversations, *args, **more)

    for module in (encode, turns):
        monkeypatch.setattr(module, "render_all", counting)
    tokenizer.chat_template = PLAIN
    for answers in (20, 40):
        talk = chat(*["the quick fox"] * (2 * answers))
        [row] = encode.encode_records(tokenizer, [talk], {}, Tally())
        assert max(row.marks) == answers
    assert sum(rendered[:2]) < 2 * 2 * 20 and sum(rendered[2:]) < 2 * 2 * 40


def test_a_refusal_shows_the_whole_conversation_however_it_was_read(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = chat(*["q", "fine"] * 6, "q", "fox</s> and on")
    tokenizer.chat_template = "{{ 'As it begins. ' }}" + PLAIN.replace("m.content", "m.content | replace('fox', 'dog')")
    said = []
    for many in (1, 99):
        monkeypatch.setattr(encode, "MANY", many)
        for record in (talk, chat(*["q", "fine"] * 6, "q", "fox")):
            tally = Tally()
            assert not list(encode.encode_records(copy.copy(tokenizer), [record], {}, tally))
            said.append(tally.lines())
    assert said[:2] == said[2:] and "As it begins" in "".join(said[1])
