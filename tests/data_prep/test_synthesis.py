"""Self-synthesis: where the user turn starts and ends, and which questions fall to which filter."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep import synthesis
from data_prep.duplicates import near_duplicates, normalised, shingles, words
from data_prep.synthesis import Question, sift, synthesise
from data_prep.template import edges, prompt_ids, render
from recipes.schema import SourceConfig, UserError


def fake_target(tokenizer: Any) -> Any:
    """All that synthesis itself reads of a target."""
    return SimpleNamespace(tokenizer=tokenizer, eos_ids=frozenset({1}))


def test_edges_are_the_templates_own(tokenizer: Any) -> None:
    user, assistant = edges(tokenizer, "user", {}), edges(tokenizer, "assistant", {})
    assert (user.before, user.after, user.end_ids) == ("<s>user\n", "</s>\n", {1})
    assert (assistant.before, assistant.end_ids) == ("<s>user\nHello.</s>\n<s>assistant\n", {1})
    asked = [{"role": "user", "content": "hi"}]
    assert tokenizer.decode(prompt_ids(tokenizer, asked, {})) == "<s>user\nhi</s>\n<s>assistant\n"
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UserError, match="roles must alternate"):
        render(tokenizer, asked, {})
    tokenizer.chat_template = "nothing of the user"
    with pytest.raises(UserError, match="does not show the text"):
        edges(tokenizer, "user", {})


def test_filters_are_counted(tokenizer: Any) -> None:
    def written(text: str, end: str = "</s>", opening: str = "") -> Question:
        return Question(opening, tokenizer(text + end, add_special_tokens=False)["input_ids"])

    long = "please tell me how many foxes jump over the lazy dog in one day"
    questions = [
        written(long),
        written("no end here at all", end=""),
        written("two words"),
        written(" a poem", opening="Write me"),  # the opening's words are not the target's
        written("a </s> marker in the middle"),
        written("ab " * 40),
        written(long.upper() + "!"),
        written(long.replace("one day", "one week")),
        written(" a poem about rain", opening="Write"),
        written("unrelated question about trains"),
    ]
    questions[4] = Question("", [0, *questions[9].ids])
    texts, fell = sift(tokenizer, questions, frozenset({1}))
    assert texts == [long, "Write a poem about rain", "unrelated question about trains"]
    expected = {"truncated": 1, "markers": 1, "empty": 2, "repetition": 1, "duplicate": 1, "near_duplicate": 1}
    assert fell == expected and len(texts) + sum(fell.values()) == len(questions)


def fake_generate(tokenizer: Any, good: Callable[[int], bool], log: list[list[list[int]]]) -> Callable[..., Any]:
    def generate(target: Any, prompts: list[list[int]], **options: Any) -> list[list[int]]:
        start = sum(map(len, log))
        log.append(prompts)
        out = []
        for i in range(start, start + len(prompts)):
            words_of_its_own = " ".join(f"w{i}x{j}" for j in range(8))
            out.append(tokenizer(words_of_its_own if good(i) else "no")["input_ids"] + [1])
        return out

    return generate


def test_what_fell_is_generated_again_within_the_limit(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = SourceConfig(kind="self", rows=20, openings=["", "Why "])
    log: list[list[list[int]]] = []
    monkeypatch.setattr(synthesis, "generate", fake_generate(tokenizer, lambda i: i % 5 != 0, log))
    prompts, report = synthesise(fake_target(tokenizer), "chat", source, {}, slots=4, seed=0)
    assert (len(prompts), report["generated"], report["fell"]["empty"]) == (20, 25, 5)
    assert [len(batch) for batch in log] == [20, 5]
    assert [tokenizer.decode(p) for p in log[0][:3]] == ["<s>user\n", "<s>user\nWhy ", "<s>user\n"]
    assert [p.id for p in prompts[:2]] == ["chat-0", "chat-1"]

    log.clear()
    monkeypatch.setattr(synthesis, "generate", fake_generate(tokenizer, lambda i: i % 2 == 0, log))
    prompts, report = synthesise(fake_target(tokenizer), "chat", source, {}, slots=4, seed=0)
    assert (len(prompts), report["generated"]) == (13, 26)


def test_a_user_turn_that_ends_in_ordinary_text_is_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    source = SourceConfig(kind="self", rows=1)
    with pytest.raises(UserError, match=r"data.sources.chat: .*ordinary text"):
        synthesise(fake_target(tokenizer), "chat", source, {}, slots=1, seed=0)


def test_words_and_normal_form() -> None:
    assert words("Don't stop: 3 cats, 東京へ行く") == ["don", "t", "stop", "3", "cats", *"東京へ行く"]
    assert normalised(" Hello,  WORLD! ") == normalised("hello world") != normalised("hello")
    assert normalised("??") == "??"


sentence = st.lists(st.sampled_from(["a", "b", "c", "d", "e", "f"]), max_size=14).map(" ".join)


@given(st.lists(sentence, max_size=12), st.lists(sentence, max_size=3), st.booleans())
def test_near_duplicates_are_exactly_those_of_jaccard(texts: list[str], against: list[str], among: bool) -> None:
    def alike(a: str, b: str) -> bool:
        x, y = shingles(a), shingles(b)
        return len(x & y) >= 0.5 * len(x | y)

    kept, expected = list(against), []
    for text in texts:
        expected.append(any(alike(text, other) for other in kept))
        if among and not expected[-1]:
            kept.append(text)
    assert near_duplicates(texts, against, among) == expected
