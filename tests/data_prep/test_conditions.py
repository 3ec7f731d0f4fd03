"""Tools, system turns and template arguments of the training data are written down, and a missing mode is told."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.conditions import conditions, one_sided, unread
from data_prep.run import prepare
from data_prep.schemas import Conversation, Record, Rendered
from data_prep.template import arguments_read
from models.target import Target, load_target
from recipes.schema import Recipe, SourceConfig, TargetConfig
from tests.data_prep.styles import GPT_OSS, QWEN3, STYLES

TOOL = {"type": "function", "function": {"name": "look"}}
Q, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
S = {"role": "system", "content": "s"}


def test_counts() -> None:
    call = {**A, "tool_calls": [TOOL]}
    records: list[Record] = [
        Conversation("1", [S, Q, A]),
        Conversation("2", [Q, call, {"role": "tool", "content": "x"}], tools=[TOOL]),
        Conversation("3", [Q, A], template_args={"enable_thinking": False}),
        Rendered("4", "text"),
    ]
    assert conditions(records, {"x": 1}) == {
        "records": 4,
        "with_system": 1,
        "with_tools": 1,
        "with_tool_calls": 1,
        "rendered_or_tokenised": 1,
        "tools": ["look"],
        "template_args": [
            {"arguments": {"x": 1}, "records": 2},
            {"arguments": {"enable_thinking": False, "x": 1}, "records": 1},
        ],
    }


def test_a_mode_that_no_conversation_has_is_warned_of() -> None:
    thinking, silent = (Conversation("1", [Q, A], template_args={"enable_thinking": on}) for on in (True, False))
    plain = Conversation("1", [Q, A])
    assert one_sided(QWEN3, conditions([thinking, silent], {})) == []
    (warning,) = one_sided(QWEN3, conditions([silent, silent], {}))
    assert "switch enable_thinking" in warning and "at false" in warning
    (warning,) = one_sided(QWEN3, conditions([plain], {}))
    assert "at the template's default" in warning
    assert one_sided(GPT_OSS, conditions([plain], {})) == []  # there `thinking` is a field of a turn


def test_what_the_template_does_not_read_is_warned_of(tokenizer: Any) -> None:
    (tools,) = [s for s in STYLES if s.tools]
    call = {**A, "tool_calls": [TOOL]}
    records: list[Record] = [Conversation("1", [Q, call], tools=[TOOL], template_args={"enable_thinkin": False})]
    records.append(Conversation("2", [Q, A], template_args={"enable_thinking": False, "enable_thinkin": True}))

    def warnings(template: Any) -> list[str]:
        tokenizer.chat_template = template
        return unread(str(template), arguments_read(tokenizer), conditions(records, {}))

    said = warnings(QWEN3)
    assert len(said) == 3 and "2 training conversations give the template argument enable_thinkin," in said[0]
    assert "Did you mean enable_thinking?" in said[0]
    assert "1 training conversations hold tools, which" in said[1] and "hold tool calls, which" in said[2]
    assert [w.split(",")[0][-14:] for w in warnings(tools.template)] == ["enable_thinkin", "nable_thinking"]
    # some tokenizers come with several templates, each under a name
    assert warnings({"default": QWEN3, "tool_use": tools.template}) == said[:1]


@pytest.fixture(scope="module")
def target(target_folder: Path) -> Target:
    return load_target(TargetConfig(path=str(target_folder)), "cpu", torch.float32)


def test_what_a_row_asks_the_template_for_survives_to_its_tokens_and_the_report(
    make_recipe: Callable[..., Recipe], target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through every stage: file -> answers by the target -> rows -> report, whose conditions training exports."""
    with_tools = (
        "{% if tools %}{{ 'TOOLS ' + tools[0].function.name + '\n' }}{% endif %}{{ 'MOOD ' + (mood or '-') + '\n' }}"
    )
    monkeypatch.setattr(target.tokenizer, "chat_template", with_tools + target.tokenizer.chat_template)
    monkeypatch.setattr("data_prep.run.load_tokenizer", lambda *_: target.tokenizer)
    path = tmp_path / "talks.jsonl"
    rows: list[dict[str, Any]] = [{"id": f"p{i}", "prompt": f"say {i}"} for i in range(8)]
    rows[0] |= {"tools": [TOOL], "template_args": {"mood": "sad"}, "system": "be kind"}
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    sources = {"mine": SourceConfig(path=str(path)), "kept": SourceConfig(path=str(path), answers="keep")}
    path.write_text("".join(json.dumps({**r, "response": "well, yes"}) + "\n" for r in rows))
    made = prepare(make_recipe(sources={"mine": sources["kept"]}, validation_rows=1), lambda dtype: target)
    regenerated = prepare(make_recipe(sources={"mine": sources["mine"]}, validation_rows=1), lambda dtype: target)
    for prepared in (made, regenerated):
        assert prepared.report["conditions"]["tools"] == ["look"] and prepared.report["conditions"]["with_tools"] == 1
        assert {"arguments": {"mood": "sad"}, "records": 1} in prepared.report["conditions"]["template_args"]
        texts = {m["id"]: target.tokenizer.decode(prepared.train.row(i)[0]) for i, m in enumerate(prepared.train.meta)}
        assert texts["p0"].startswith("TOOLS look\nMOOD sad\n<s>system\nbe kind</s>")
        assert sum(t.startswith("MOOD -\n<s>user") for t in texts.values()) == len(texts) - 1
