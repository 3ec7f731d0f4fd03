"""Answers by an OpenAI-compatible server, over real HTTP: what it says, how it fails, and what is made of it."""

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep import server, shards
from data_prep.prompts import Prompt
from data_prep.rows import Rows
from data_prep.run import prepare
from data_prep.template import prompt_ids
from models.target import Target
from recipes.schema import Recipe, ServerConfig, SourceConfig, UserError
from tests.data_prep import fake_server
from tests.data_prep.fake_server import Fake, garbage, half_a_body, hang_up, serving, silence, status, words_of
from tests.tiny import tiny_tokenizer

Maker = Callable[..., Recipe]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    monkeypatch.setattr(server, "FIRST_WAIT", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with serving() as running:
        yield running


@pytest.fixture
def served(make_recipe: Maker, fake: Fake, tmp_path: Path) -> Callable[..., Recipe]:
    """A recipe of 40 dialogues, half of them of two turns, in shards of 16, answered by the fake server."""
    path = tmp_path / "traffic.jsonl"
    turns = [[f"count to {i} for me"] + ["and back again"] * (i % 2) for i in range(40)]
    path.write_text("".join(json.dumps({"id": f"p{i}", "turns": t}) + "\n" for i, t in enumerate(turns)))

    def make(cache: str = "cache", **changes: Any) -> Recipe:
        config = ServerConfig(url=fake.url, **{"concurrency": 1, "timeout": 30.0, **changes})
        sources = {"asked": SourceConfig(path=str(path))}
        return make_recipe(sources=sources, server=config, temperatures=[0.7], cache=str(tmp_path / cache))

    return make


def never(dtype: torch.dtype) -> Target:
    raise AssertionError("a server answers, so the target's weights are not needed")


def rows_of(recipe: Recipe) -> list[tuple[list[int], list[int], dict[str, Any]]]:
    [folder] = Path(recipe.data.cache).glob("answers-*")
    rows: Rows = shards.read(folder)
    return [(rows.row(i)[0].tolist(), rows.row(i)[1].tolist(), rows.meta[i]) for i in range(len(rows))]


def report_of(recipe: Recipe) -> dict[str, Any]:
    [folder] = Path(recipe.data.cache).glob("answers-*")
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


def test_rows_are_what_the_server_said(served: Callable[..., Recipe], fake: Fake) -> None:
    recipe = served(concurrency=3)
    prepare(recipe, never)
    tokenizer, rows = tiny_tokenizer(), rows_of(recipe)
    assert len(rows) == 40
    for ids, marks, meta in rows:
        number = int(meta["id"].removeprefix("p"))
        first = prompt_ids(tokenizer, Prompt("", [f"count to {number} for me"]).messages(), {})
        said = words_of(first, 24)
        assert ids[: len(first) + len(said)] == first + said
        assert marks[: len(first) + len(said)] == [0] * len(first) + [1] * len(said)
        if number % 2:
            start = marks.index(2)
            again = ids[len(first) + len(said) : start]
            assert tokenizer.decode(again) == "\n<s>user\nand back again</s>\n<s>assistant\n"
            assert ids[start:] == words_of(ids[:start], min(24, 96 - start))
    assert report_of(recipe)["troubles"] == {} and report_of(recipe)["served"] == {"id": "tiny", "root": "tiny/root"}


def test_the_targets_own_law_is_asked_for(
    served: Callable[..., Recipe], fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    prepare(served(), never)
    body = fake.asked[0]
    assert {k: body[k] for k in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop_token_ids")} == {
        "temperature": 0.7, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "stop_token_ids": [1],
    }  # fmt: skip
    assert len({b["seed"] for b in fake.asked}) == len(fake.asked) == 60
    assert {h["Authorization"] for h in fake.headers_seen} == {"Bearer sesame"}


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (status(429), "429"),
        (status(500), "500"),
        (status(503), "503"),
        (garbage, "garbage"),
        (half_a_body, "half a body"),
        (hang_up, "half a body"),
        (silence, "timeout"),
        (status(200, '{"choices": []}'), "garbage"),
        (status(200, '{"choices": [{"finish_reason": "stop", "token_ids": [99999]}]}'), "garbage"),
        (status(200, '{"choices": [{"finish_reason": "abort", "token_ids": [5]}]}'), "broken off"),
    ],
)
def test_troubles_are_mended_by_asking_again_and_counted(
    served: Callable[..., Recipe], fake: Fake, fault: fake_server.Fault, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    good = served("good", concurrency=2)
    prepare(good, never)
    fake.asked.clear()
    fake.faults = lambda n, body: fault if n % 20 == 3 else None
    recipe = served("bad", concurrency=2, timeout=0.4)
    prepare(recipe, never)
    assert rows_of(recipe) == rows_of(good)
    assert report_of(recipe)["troubles"] == {kind: 3}
    assert f"troubles with the server: 3 x {kind}" in capsys.readouterr().out


def test_retry_after_pauses_everything(served: Callable[..., Recipe], fake: Fake) -> None:
    fake.faults = lambda n, body: status(429, Retry_After="1") if n == 5 else None
    prepare(served(concurrency=2), never)
    gaps = [b - a for a, b in zip(fake.times, fake.times[1:], strict=False)]
    assert max(gaps) > 0.9 and sum(gap > 0.5 for gap in gaps) == 1


def test_concurrency_and_rate_are_held(served: Callable[..., Recipe], fake: Fake) -> None:
    fake.delay = 0.02
    prepare(served("wide", concurrency=6), never)
    assert fake.most_in_flight == 6
    fake.times.clear()
    prepare(served("slow", concurrency=6, requests_per_minute=3000), never)
    gaps = [b - a for a, b in zip(fake.times, fake.times[1:], strict=False)]
    assert len(gaps) == 59 and sum(gaps) > 0.9 * 59 * 60 / 3000


def test_a_row_that_the_server_will_not_take_is_named_and_left_out(
    served: Callable[..., Recipe], fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tiny_tokenizer()

    def refuse(n: int, body: dict[str, Any]) -> fake_server.Fault | None:
        return status(400, "prompt too rude") if "count to 6 " in tokenizer.decode(body["prompt"]) else None

    fake.faults = refuse
    recipe = served()
    prepare(recipe, never)
    report = report_of(recipe)
    assert (report["rows"], report["failed"], report["troubles"]) == (39, 1, {"refused": 1})
    assert report["examples"] == {"failed": ["asked, p6: the server answers 400: prompt too rude"]}
    assert "failed: asked, p6: the server answers 400" in capsys.readouterr().out
    assert len(fake.asked) == 60  # and it was asked once


def test_a_server_that_dies_leaves_whole_shards_and_the_next_run_goes_on(
    served: Callable[..., Recipe], fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "ATTEMPTS", 3)
    prepare(served("good"), never)
    recipe = served("dying")
    fake.asked.clear()
    fake.faults = lambda n, body: status(500, "out of memory") if n > 40 else None
    with pytest.raises(UserError, match=r"left 8 requests in a row unanswered, .* 500: out of memory") as caught:
        prepare(recipe, never)
    assert "Finished shards are kept" in str(caught.value) and "Traceback" not in str(caught.value)
    [folder] = Path(recipe.data.cache).glob("answers-*")
    there = len(list(folder.glob("shard-*")))
    assert 0 < there < 3 and not (folder / "report.json").exists()
    fake.faults, asked = lambda n, body: None, len(fake.asked)
    prepare(recipe, never)
    assert rows_of(recipe) == rows_of(served("good"))
    assert len(fake.asked) - asked < 60  # the shards that were there were not asked for again


def test_a_server_that_takes_nothing_gives_no_shard(served: Callable[..., Recipe], fake: Fake) -> None:
    fake.faults = lambda n, body: status(422, "unknown parameter top_k")
    recipe = served()
    with pytest.raises(UserError, match=r"failed 1\d of the 1\d dialogues of shard \d, .*422: unknown parameter top_k"):
        prepare(recipe, never)
    assert not [*Path(recipe.data.cache).glob("answers-*/shard-*")]


def test_killed_and_run_again_it_holds_the_same_rows(served: Callable[..., Recipe], fake: Fake) -> None:
    prepare(served("good"), never)
    recipe, fork = served("killed"), multiprocessing.get_context("fork")
    fake.delay = 0.01
    for moment in (0.3, 0.5):
        process = fork.Process(target=prepare, args=(recipe, never))
        process.start()
        process.join(moment)
        process.kill()
        process.join()
    prepare(recipe, never)
    assert rows_of(recipe) == rows_of(served("good"))


def test_another_model_behind_the_same_address_is_not_mixed_in(
    served: Callable[..., Recipe], fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "ATTEMPTS", 1)
    recipe = served()
    fake.faults = lambda n, body: status(500) if n > 40 else None
    with pytest.raises(UserError):
        prepare(recipe, never)
    fake.faults = lambda n, body: None
    fake.models = {"data": [{"id": "tiny", "root": "tiny/finetuned"}]}
    with pytest.raises(UserError, match=r"cannot be mixed(.|\n)*served: .*tiny/root.*tiny/finetuned"):
        prepare(recipe, never)


@pytest.mark.parametrize(
    ("models", "config", "complaint"),
    [
        (None, {}, "serves nothing"),
        ("nonsense", {}, "no list of models"),
        ({"data": [{"id": "a"}, {"id": "b"}]}, {}, "serves a, b. Name one"),
        ({"data": [{"id": "a"}]}, {"model": "b"}, "data.server.model='b'.*serves a"),
        ({"data": [{"id": "a", "max_model_len": 64}]}, {}, "takes 64 tokens, data.max_length=96"),
    ],
)
def test_what_can_be_seen_is_refused_before_anything_is_asked(
    served: Callable[..., Recipe], fake: Fake, models: Any, config: dict[str, Any], complaint: str
) -> None:
    fake.models = models
    with pytest.raises(UserError, match=complaint):
        prepare(served(**config), never)
    assert fake.asked == []


def test_a_server_that_wants_a_key_says_where_to_put_it(served: Callable[..., Recipe], fake: Fake) -> None:
    fake.closed = True
    with pytest.raises(UserError, match=r"/v1/models answers 401. It wants a key.*set OPENAI_API_KEY"):
        prepare(served(), never)


def test_no_server_there(served: Callable[..., Recipe], fake: Fake) -> None:
    recipe = served()
    gone = replace(recipe.data.server, url="http://127.0.0.1:9/v1")
    with pytest.raises(UserError, match=r"data.server.url=http://127.0.0.1:9/v1: no answer"):
        prepare(replace(recipe, data=replace(recipe.data, server=gone)), never)


@pytest.mark.parametrize(
    ("fault", "change", "complaint"),
    [
        (status(401, "bad key"), None, "answers 401: bad key.*set OPENAI_API_KEY"),
        (status(404, "no such model"), None, "answers 404"),
        (None, {"model": "other"}, "was asked for 'tiny' and answers as 'other'"),
        (None, {"usage": {"prompt_tokens": 3}}, "counts 3 tokens in a prompt of"),
    ],
)
def test_what_no_asking_again_can_mend_stops_at_once(
    served: Callable[..., Recipe],
    fake: Fake,
    fault: Any,
    change: Any,
    complaint: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    fake.faults = lambda n, body: fault
    fake.change = lambda reply: reply | (change or {})
    with pytest.raises(UserError, match=complaint):
        prepare(served(concurrency=4), never)
    assert len(fake.asked) < 10
    assert "Traceback" not in capfd.readouterr().err


def test_a_model_of_several_names_may_answer_by_another(served: Callable[..., Recipe], fake: Fake) -> None:
    fake.models = {"data": [{"id": "one", "root": "m"}, {"id": "two", "root": "m"}, {"id": "other", "root": "n"}]}
    fake.change = lambda reply: reply | {"model": "one"}
    recipe = served(model="two")
    prepare(recipe, never)
    assert len(rows_of(recipe)) == 40 and fake.asked[0]["model"] == "two"
    fake.change = lambda reply: reply | {"model": "other"}
    with pytest.raises(UserError, match="asked for 'two' and answers as 'other'"):
        prepare(served("again", model="two"), never)


def test_a_server_that_gives_text_alone(served: Callable[..., Recipe], fake: Fake) -> None:
    def text_alone(reply: dict[str, Any]) -> dict[str, Any]:
        choice = reply["choices"][0]
        return reply | {"choices": [{"text": "the fox", "finish_reason": choice["finish_reason"]}]}

    fake.change = text_alone
    recipe = served()
    prepare(recipe, never)
    ids, marks, meta = rows_of(recipe)[0]
    assert [t for t, m in zip(ids, marks, strict=True) if m] == [*tiny_tokenizer()("the fox")["input_ids"], 1]
    assert meta["fate"] == "ended" and report_of(recipe)["troubles"] == {"tokenised here": 60}


def test_questions_are_written_by_the_server_too(served: Callable[..., Recipe], fake: Fake) -> None:
    recipe = served()
    own, tokenizer = SourceConfig(kind="self", rows=20, max_tokens=60), tiny_tokenizer()

    def question(reply: dict[str, Any]) -> dict[str, Any]:
        n = len(fake.asked)
        ids = tokenizer(f"why is the {n * n}th fox of the {n}th dog so very {n + 7} quick")["input_ids"]
        return reply | {"choices": [{"token_ids": [*ids, 1], "finish_reason": "stop"}]}

    fake.change = question
    made = prepare(replace(recipe, data=replace(recipe.data, sources={"own": own})), never)
    assert made.report["sources"]["own"]["kept"] == 20
    assert tokenizer.decode(fake.asked[0]["prompt"]) == "<s>user\n" and fake.asked[0]["max_tokens"] == 60


def test_an_interrupt_is_not_held_up_by_open_requests(served: Callable[..., Recipe], fake: Fake) -> None:
    fake.delay = 5.0
    recipe = served(concurrency=8)
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=prepare, args=(recipe, never))
    process.start()
    deadline = time.monotonic() + 60
    while len(fake.asked) < 8 and time.monotonic() < deadline:
        time.sleep(0.02)
    began = time.monotonic()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    process.join()
    assert time.monotonic() - began < 3.0
