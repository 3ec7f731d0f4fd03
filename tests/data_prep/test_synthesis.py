"""Self-synthesis: where the user turn starts and ends, and which questions fall to which filter."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.dialogue import Terms
from data_prep.duplicates import near_duplicates, normalised, shingles, words
from data_prep.synthesis import Question, distinct, sift, synthesise
from data_prep.template import edges, prompt_ids, render
from data_prep.writer import Request
from recipes.schema import SourceConfig, UserError


@pytest.fixture
def terms(tokenizer: Any) -> Terms:
    return Terms(tokenizer, {}, frozenset({1}), 96, 24)


class Scribe:
    """A writer that writes what it is told for the i-th request of its life; it remembers what it was asked."""

    def __init__(self, tokenizer: Any, text: Callable[[int], str]) -> None:
        self.tokenizer, self.text = tokenizer, text
        self.log: list[list[Request]] = []

    def write(self, requests: list[Request], stop_ids: frozenset[int], seed: int, label: str) -> list[list[int] | None]:
        start = sum(map(len, self.log))
        self.log.append(requests)
        texts = [self.text(start + i) for i in range(len(requests))]
        return [[*self.tokenizer(text)["input_ids"], 1] for text in texts]

    def opening(self, batch: int, i: int) -> str:
        return str(self.tokenizer.decode(self.log[batch][i].prompt))

    def describe(self) -> dict[str, Any]:
        return {}

    def follow(self, manifest: Any) -> None: ...

    def answer(self, shards: Any, begin: Any, seed: int, done: Any) -> None: ...

    def logprobs(self, rows: Any) -> list[float] | None: ...


def of_its_own(i: int) -> str:
    return " ".join(f"w{i}x{j}" for j in range(8))


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


def test_what_fell_is_generated_again_within_the_limit(terms: Terms) -> None:
    source = SourceConfig(kind="self", rows=20, openings=["", "Why "])
    scribe = Scribe(terms.tokenizer, lambda i: of_its_own(i) if i % 5 else "no")
    prompts, report = synthesise(scribe, terms, "chat", source, seed=0)
    assert (len(prompts), report["generated"], report["fell"]["empty"]) == (20, 25, 5)
    assert [len(batch) for batch in scribe.log] == [20, 5]
    assert [scribe.opening(0, i) for i in range(3)] == ["<s>user\n", "<s>user\nWhy ", "<s>user\n"]
    assert [p.id for p in prompts[:2]] == ["chat-0", "chat-1"]

    prompts, report = synthesise(
        Scribe(terms.tokenizer, lambda i: of_its_own(i) if i % 2 else "no"), terms, "chat", source, seed=0
    )
    assert (len(prompts), report["generated"]) == (13, 26)


def test_openings_temperatures_and_subjects_are_dealt_out_against_each_other(terms: Terms) -> None:
    """Every opening meets every temperature, with a subject and without."""
    source = SourceConfig(kind="self", rows=48, openings=["", "Why "], temperatures=[0.7, 1.0, 1.3], subjects=4)
    too_long = "5. Trains and the people in them today"
    listed = f"Tea\n2. Rain: why it falls\n3) **Old books**\n4. tea.\n- none\n{too_long}\n6. Z"
    scribe = Scribe(terms.tokenizer, lambda i: listed if i == 0 else of_its_own(i))
    _, report = synthesise(scribe, terms, "chat", source, seed=0)
    assert scribe.opening(0, 0).endswith("<s>assistant\n1.") and "topics" in scribe.opening(0, 0)
    assert report["subjects"] == 3
    asked = scribe.log[1]
    heads = [scribe.opening(1, i).removeprefix("<s>system\nThe user asks about this subject: ") for i in range(48)]
    subjects = [head.partition("</s>")[0] if "</s>" in head else "" for head in heads]
    assert set(subjects) == {"", "Tea", "Rain", "Old books"} and subjects.count("") == 24
    met = {(h.endswith("Why "), r.temperature, bool(s)) for h, r, s in zip(heads, asked, subjects, strict=True)}
    assert len(met) == 12


def test_a_user_turn_that_ends_in_ordinary_text_is_refused(terms: Terms) -> None:
    terms.tokenizer.chat_template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    source = SourceConfig(kind="self", rows=1)
    with pytest.raises(UserError, match=r"data.sources.chat: .*ordinary text"):
        synthesise(Scribe(terms.tokenizer, of_its_own), terms, "chat", source, seed=0)


def test_distinct_trigrams() -> None:
    assert distinct(["a b c d", "A, b c!"]) == 0.667 and distinct(["a b"]) == 0.0


def test_words_and_normal_form() -> None:
    assert words("Don't stop: 3 cats, 東京へ行く") == ["don", "t", "stop", "3", "cats", *"東京へ行く"]
    assert normalised(" Hello,  WORLD! ") == normalised("hello world") != normalised("hello")
    assert normalised("??") == "??"


sentence = st.lists(st.sampled_from(["a", "b", "c", "d", "e", "f"]), max_size=14).map(" ".join)


@settings(deadline=None)  # the first call imports the library
@given(st.lists(sentence, max_size=12), st.lists(sentence, max_size=3), st.booleans())
def test_near_duplicates_against_exact_jaccard(texts: list[str], against: list[str], among: bool) -> None:
    """What is named is really alike; what is alike is named, but for the pairs that MinHash overlooks."""

    def similarity(a: str, b: str) -> float:
        x, y = shingles(a), shingles(b)
        return len(x & y) / len(x | y)

    verdicts = near_duplicates(texts, against, among)
    kept = list(against)
    for text, verdict in zip(texts, verdicts, strict=True):
        closest = max((similarity(text, other) for other in kept), default=0.0)
        assert closest >= 0.5 if verdict else closest < 0.8
        if among and not verdict:
            kept.append(text)


def test_minhash_overlooks_few_pairs_at_the_threshold() -> None:
    """Pairs of 5-gram similarity just above 0.5, all different from each other."""
    against = [" ".join(f"w{i}x{j}" for j in range(30)) for i in range(1000)]
    texts = [text.rsplit(" ", 9)[0] + f" z{i} z z z z z z" for i, text in enumerate(against)]
    x, y = shingles(against[0]), shingles(texts[0])
    assert 0.5 <= len(x & y) / len(x | y) < 0.54
    assert sum(near_duplicates(texts, against, among=False)) >= 990
