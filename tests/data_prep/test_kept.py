"""Answers that the data came with: kept as rows, or asked again, and held against what the target would say."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep import shards
from data_prep.answers import Work, answer
from data_prep.dialogue import Terms
from data_prep.kept import encode_kept, unlikely
from data_prep.local import Local
from data_prep.rows import make_rows
from data_prep.run import prepare
from data_prep.schemas import Conversation, Record, Tokenised
from data_prep.server import Server
from data_prep.writer import Request
from models.target import Target
from recipes.schema import DataConfig, Recipe, ServerConfig, SourceConfig
from tests.data_prep.fake_server import serving


@pytest.fixture
def target(tiny_target: Callable[..., Target]) -> Target:
    return tiny_target("llama", initializer_range=0.6)


@pytest.fixture
def terms(target: Target) -> Terms:
    return Terms(target.tokenizer, {}, frozenset({1}), max_length=96, answer_tokens=24)


@pytest.fixture
def local(target: Target) -> Local:
    return Local(lambda dtype: target, torch.device("cpu"), "float32", 4)


def said(id: str, *texts: str) -> Conversation:
    roles = ("user", "assistant")
    return Conversation(id, [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)])


def test_kept_answers_become_rows_as_they_are(terms: Terms) -> None:
    part: list[tuple[str, Record]] = [
        ("s", said("a", "one", "fox", "two", "dog")),
        ("s", said("long", "one", "x " * 200)),
        ("s", said("full", "x " * 200, "fox")),
        ("s", said("unanswered", "one")),
        ("t", Tokenised("ids", [5, 6, 7, 8, 1], [0, 0, 1, 1, 1])),
        ("t", said("loop", "one", "ab" * 30)),
    ]
    rows, report = encode_kept(terms, part)
    assert [(m["id"], m["fate"], m["source"], m["loop"]) for m in rows.meta] == [
        ("a", "ended", "s", False),
        ("long", "cut", "s", True),
        ("ids", "ended", "t", False),
        ("loop", "ended", "t", True),
    ]
    ids, marks = rows.row(0)
    assert terms.tokenizer.decode(ids[marks == 1].tolist()) == "fox</s>"
    assert terms.tokenizer.decode(ids[marks == 2].tolist()) == "dog</s>"
    assert int(rows.lengths.max()) == 96 and rows.meta[0]["temperature"] is None
    counts = {k: report[k] for k in ("prompts", "rows", "kept_rows", "cut", "no_room")}
    assert counts == {"prompts": 6, "rows": 4, "kept_rows": 4, "cut": 1, "no_room": 1}
    assert report["kept_refused"] == {"no answer to keep": 1} and report["kept_mended"] == {}


def test_each_source_says_whether_its_answers_are_kept(tmp_path: Path, terms: Terms, local: Local) -> None:
    data = DataConfig(sources={"mine": SourceConfig(path="x", answers="keep"), "asked": SourceConfig(path="y")})
    pairs: list[tuple[str, Record]] = [
        (s, said(f"{i}", f"count to {i}", "fox")) for i in range(9) for s in data.sources
    ]
    pairs.append(("asked", Tokenised("ids", [5, 6, 7, 8, 1], [0, 0, 1, 1, 1])))  # nothing to ask there
    report = answer(tmp_path / "a", Work.of(pairs, data), local, terms, data, 0, {"model": "m"})
    rows = shards.read(tmp_path / "a")
    kept = [m for m in rows.meta if m["temperature"] is None]
    assert len(rows) == 19 and [m["source"] for m in kept] == ["mine"] * 9 + ["asked"]
    assert (report["prompts"], report["kept_rows"], report["shards"]) == (19, 10, 2)
    assert report["kept_likelihood"]["mine"]["rows"] == 9
    foxes = [i for i, m in enumerate(rows.meta) if m["source"] == "mine"]
    assert all(terms.tokenizer.decode(rows.row(i)[0][rows.row(i)[1] == 1].tolist()) == "fox</s>" for i in foxes)


def test_answers_that_the_target_would_not_give_are_warned_of(target: Target, terms: Terms, local: Local) -> None:
    prompts = [target.tokenizer(f"<s>user\ncount to {i}</s>\n<s>assistant\n")["input_ids"] for i in range(24)]
    own = local.write([Request(p, 24, 1.0) for p in prompts], frozenset({1}), 7, "")
    source = torch.Generator().manual_seed(0)
    other = [torch.randint(2, 320, (24,), generator=source).tolist() for _ in prompts]
    verdicts = []
    for answers in (own, other):
        pairs = [([*p, *(a or [])], [0] * len(p) + [1] * len(a or [])) for p, a in zip(prompts, answers, strict=True)]
        rows = make_rows(pairs, [{"source": "s", "key": str(i), "temperature": None} for i in range(24)])
        found, warnings = unlikely(local, terms, rows, seed=0)
        verdicts.append((found["s"]["kept"], found["s"]["target"], warnings))
    (near, mine, none), (far, same, [warning]) = verdicts
    assert abs(near - mine) < 0.5 and none == [] and far < same - 0.5
    assert (
        "kept answers of s are unlikely under the target" in warning and "data.sources.s.answers=regenerate" in warning
    )


def test_mean_log_probability_is_that_of_the_law(target: Target, local: Local) -> None:
    ids = [5, 9, 30, 7, 2, 11]
    law = target.logits(target.features(torch.tensor([ids])).final_BTH[0]).double().log_softmax(-1)
    expected = sum(float(law[i - 1, ids[i]]) for i in (3, 4, 5)) / 3
    scores = local.logprobs([(ids, 3)])
    assert scores is not None and abs(scores[0] - expected) < 1e-5


def test_a_server_that_scores_prompts_is_asked_to(terms: Terms) -> None:
    def scored(body: dict[str, Any]) -> dict[str, Any]:
        values = [None, *(-0.1 * token for token in body["prompt"][1:]), -9.0]
        return {"choices": [{"text": "", "logprobs": {"token_logprobs": values}, "finish_reason": "length"}]}

    with serving() as fake:
        server = Server(ServerConfig(url=fake.url), terms.tokenizer, 1, 320, 96)
        fake.faults = lambda n, body: lambda handler: handler.reply(200, json.dumps(scored(body)).encode())
        assert server.logprobs([([5, 10, 20, 30], 2), ([1, 2], 1)]) == pytest.approx([-2.5, -0.2])
        fake.faults = lambda n, body: None
        assert server.logprobs([([5, 10, 20, 30], 2)]) is None


def test_the_summary_counts_what_was_refused_and_mended(
    make_recipe: Callable[..., Recipe], target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a file with every kind of row to the printed summary: nothing goes without a word."""
    path = tmp_path / "talks.jsonl"
    rows: list[dict[str, Any]] = [{"prompt": f"say {i}", "response": f"well {i}"} for i in range(6)]
    rows += [{"turns": ["never answered"]}, {"prompt": "q", "response": "a</s>b"}, {"foo": 1}]
    rows += [{"messages": [{"role": role, "content": role} for role in ("user", "user", "assistant", "user")]}]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    source = SourceConfig(path=str(path), answers="keep")
    made = prepare(make_recipe(sources={"mine": source}, validation_rows=1), lambda dtype: target)
    out = capsys.readouterr().out
    for line in (
        "10 rows read (7 prompt/response, 1 turns, 1 messages)",
        "mended 1: user turns in a row: joined by a blank line (line 10)",
        "refused 1: unknown schema (line 9: ",
        "data: 1 x no answer to keep: talks-7",
        "data: 1 x an end marker inside an answer: talks-8",
        "data: 1 x a last question without an answer: left out: talks-10",
    ):
        assert line in out, line
    assert len(made.train) + len(made.validation) == 7
    assert sum(made.report["answers"]["kept_refused"].values()) == 2
