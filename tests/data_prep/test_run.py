"""From a recipe to prepared rows with a tiny random target: stages, caches, splits and refusals."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep import local, run
from data_prep.loops import is_loop
from data_prep.prompts import Prompt
from data_prep.run import Prepared, check, load_prepared, main, prepare
from data_prep.sources import SourceCost, check_sources
from data_prep.template import prompt_ids
from models.target import Target, load_target
from models.vocab import VocabMap, write_vocab
from recipes.schema import Recipe, SourceConfig, TargetConfig, UserError

Maker = Callable[..., Recipe]


@pytest.fixture(scope="module")
def target(target_folder: Path) -> Target:

    return load_target(TargetConfig(path=str(target_folder)), "cpu", torch.float32)


def never(dtype: torch.dtype) -> Target:
    raise AssertionError("the target was loaded though nothing had to be generated")


def same(a: Prepared, b: Prepared) -> bool:
    pairs = ((a.train, b.train), (a.validation, b.validation))
    tensors = all(torch.equal(x.ids, y.ids) and torch.equal(x.answer, y.answer) and x.meta == y.meta for x, y in pairs)
    return tensors and a.vocab.hash() == b.vocab.hash() and a.validation_prompts == b.validation_prompts


def test_prepare_end_to_end(make_recipe: Maker, target: Target, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_recipe()
    made = prepare(recipe, lambda dtype: target)
    assert (len(made.train), len(made.validation)) == (9, 3)
    for rows in (made.train, made.validation):
        for i in range(len(rows)):
            ids, answer = rows.row(i)
            meta = rows.meta[i]
            number = meta["id"].removeprefix("p")
            asked = Prompt(meta["id"], [f"count to {number} for me"])
            prompt = prompt_ids(target.tokenizer, asked.messages(), {})
            assert ids[: len(prompt)].tolist() == prompt
            assert answer.tolist() == [0] * len(prompt) + [1] * (len(ids) - len(prompt))
            assert len(ids) <= recipe.data.max_length and len(ids) - len(prompt) <= recipe.data.answer_tokens
            assert meta["temperature"] == (1.0 if int(number) % 2 == 0 else 0.0)
            assert (meta["fate"] == "ended") == (int(ids[-1]) == 1)
            assert meta["loop"] == is_loop(ids[len(prompt) :].tolist())
    # split by prompt, and nothing on both sides
    held = {m["key"] for m in made.validation.meta}
    assert held.isdisjoint(m["key"] for m in made.train.meta)
    assert {p.key for p in made.validation_prompts} == held
    assert made.vocab.size == 64 and bool(made.vocab.t2d[1])
    assert made.report["answers"]["prompts"] == 12
    assert made.report["train"]["supervised_tokens"] > 0
    assert "to be made" in capsys.readouterr().out

    again = prepare(recipe, never)
    assert same(made, again) and again.folder == made.folder
    assert same(made, load_prepared(made.folder))
    out = capsys.readouterr().out
    assert "answers: current, skipped" in out and "to be made" not in out


def test_each_stage_depends_on_its_own_keys(make_recipe: Maker, target: Target, prompt_file: Path) -> None:
    recipe = make_recipe()
    made = prepare(recipe, lambda dtype: target)
    smaller = prepare(replace(recipe, eagle=replace(recipe.eagle, draft_vocab=32)), never)
    assert smaller.vocab.size == 32 and smaller.folder != made.folder
    assert len(prepare(make_recipe(validation_rows=5), never).validation) == 5
    for changed in (make_recipe(answer_tokens=12), replace(recipe, seed=1)):
        with pytest.raises(AssertionError, match="was loaded"):
            prepare(changed, never)
    prompt_file.write_text(prompt_file.read_text().replace("count to 3", "count up to 3"))
    with pytest.raises(AssertionError, match="was loaded"):
        prepare(recipe, never)


def test_validation_prompts_stay_when_others_come(make_recipe: Maker, target: Target, prompt_file: Path) -> None:
    recipe = make_recipe(temperatures=[0.0])
    before = prepare(recipe, lambda dtype: target)
    with prompt_file.open("a") as file:
        file.write(json.dumps({"id": "late", "turns": ["something else"]}) + "\n")
        file.write(json.dumps({"id": "twin", "turns": ["Count to 3, for me!"]}) + "\n")
    after = prepare(recipe, lambda dtype: target)
    assert after.report["fell"] == {"in_report": 0, "repeated": 1}
    assert len({p.key for p in before.validation_prompts} & {p.key for p in after.validation_prompts}) >= 2


def test_prompts_of_the_report_are_left_out(make_recipe: Maker, target: Target) -> None:
    from data_prep.prompts import SHIPPED

    sources = {**make_recipe().data.sources, "report": SourceConfig(path=str(SHIPPED / "report.jsonl"))}
    made = prepare(make_recipe(sources=sources), lambda dtype: target)
    assert made.report["fell"]["in_report"] == 24 and made.report["answers"]["prompts"] == 12


def test_the_recipes_own_evaluation_prompts_are_left_out_and_ngrams_counted(
    make_recipe: Maker, target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.jsonl"
    longer = "well now, count to 7 for me and then go home again, please"
    asked = {"e": "Count to 3 for me!", "l": longer}
    path.write_text("".join(json.dumps({"id": i, "turns": [t]}) + "\n" for i, t in asked.items()))
    recipe = make_recipe()
    recipe = replace(recipe, eval=replace(recipe.eval, prompts=str(path)))
    made = prepare(recipe, lambda dtype: target)
    assert made.report["fell"] == {"in_report": 0, "in_eval_prompts": 1, "repeated": 0}
    assert "p3" not in {m["id"] for m in (*made.train.meta, *made.validation.meta)}
    [file] = made.folder.glob("contamination-*.json")
    found = json.loads(file.read_text())
    assert {name: overlap["prompts"] for name, overlap in found.items()} == {
        "report": 24, "eval.prompts": 2, "validation": 3,
    }  # fmt: skip
    assert "have half or more of their 8-grams" not in capsys.readouterr().out


def scripted(answers_by_turn: list[Callable[[int], list[int]]]) -> Callable[..., list[list[int]]]:
    """A generate() that answers the i-th prompt of a turn by a script, within the limits it is given."""
    turns = iter(answers_by_turn)

    def generate(target: Target, prompts: list[list[int]], **options: Any) -> list[list[int]]:
        script = next(turns)
        return [script(i)[: options["max_new_tokens"][i]] for i in range(len(prompts))]

    return generate


def test_loops_are_dropped_and_counted(make_recipe: Maker, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    script = [[4] * 24 if i < 4 else [*range(5, 20), 1] for i in range(12)]
    monkeypatch.setattr(local, "generate", scripted([lambda i: script[i]]))
    dropped = prepare(make_recipe(drop_loops=True), lambda dtype: target)
    assert dropped.report["answers"]["loops"] == 4 and len(dropped.train) + len(dropped.validation) == 8
    kept = prepare(make_recipe(drop_loops=False), never)
    assert len(kept.train) + len(kept.validation) == 12
    ended = prepare(make_recipe(drop_loops=True, drop_truncated=True), never)  # those of 24 tokens had no end
    assert {m["fate"] for m in (*ended.train.meta, *ended.validation.meta)} == {"ended"}
    assert len(ended.train) + len(ended.validation) == 8 and ended.report["answers"]["truncated"] == 4


def test_the_target_writes_and_answers(make_recipe: Maker, target: Target) -> None:
    source = SourceConfig(
        kind="self", rows=40, max_tokens=80, temperatures=[1.5, 1.3], openings=["", "Why "], subjects=3
    )
    recipe = make_recipe(sources={"own": source}, validation_rows=1)
    made = prepare(recipe, lambda dtype: target)
    own = made.report["sources"]["own"]
    assert own["generated"] <= 52 and own["kept"] + own["surplus"] + sum(own["fell"].values()) == own["generated"]
    assert own["kept"] == made.report["answers"]["prompts"] > 3
    assert same(made, prepare(recipe, never))


def test_killed_in_the_middle_leaves_nothing(
    make_recipe: Maker, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe()

    def fails(*args: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    for name in ("write_json", "write_lines"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(run, name, fails)
            prepare(recipe, lambda dtype: target)
    left = [p.name for p in Path(recipe.data.cache).iterdir()]
    assert [name.split("-")[0] for name in left] == ["answers"]  # the stage that was whole before the second kill
    assert len(prepare(recipe, never).train) == 9


def test_prepared_data_with_another_vocabulary_are_refused(make_recipe: Maker, target: Target) -> None:
    made = prepare(make_recipe(), lambda dtype: target)
    write_vocab(VocabMap.from_ids(list(range(64)), target.vocab_size), made.folder / "vocab.safetensors")
    with pytest.raises(UserError, match=r"vocabulary map .* is not the one that report.json names"):
        load_prepared(made.folder)


def test_damaged_stages_are_refused_with_what_to_delete(make_recipe: Maker, target: Target, tmp_path: Path) -> None:
    recipe = make_recipe()
    root = prepare(recipe, lambda dtype: target).folder.parent
    answers, rows = sorted(root.iterdir())
    shutil.rmtree(rows)  # nothing but new rows reads the report of the answers
    (answers / "report.json").write_text("{")
    with pytest.raises(UserError, match=rf"delete .*{answers.name} and prepare again"):
        prepare(recipe, never)
    for content in (b'{"id": ', b"\xff"):
        (tmp_path / "prompts.jsonl").write_bytes(content)
        with pytest.raises(UserError, match=rf"Delete {tmp_path} and prepare again"):
            run._read_records(tmp_path / "prompts.jsonl")


def test_low_coverage_warns(make_recipe: Maker, target: Target, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_recipe()
    made = prepare(replace(recipe, eagle=replace(recipe.eagle, draft_vocab=4)), lambda dtype: target)
    assert made.report["vocabulary"]["coverage"]["overall"] < 0.95
    assert "covers less than 95% of the training tokens" in capsys.readouterr().out


def test_no_supervised_token_is_refused(make_recipe: Maker, target: Target) -> None:
    with pytest.raises(UserError, match=r"no supervised token.*validation_rows=12"):
        prepare(make_recipe(validation_rows=12), lambda dtype: target)
    with pytest.raises(UserError, match=r"no supervised token.*12 x no_room"):
        prepare(make_recipe(max_length=8), lambda dtype: target)


def test_what_is_refused_is_shown_once_and_told_again_where_nothing_is_left(
    make_recipe: Maker, target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tales.jsonl"
    path.write_text("".join(json.dumps({"text": f"Once there were {i} foxes."}) + "\n" for i in range(20)))
    with pytest.raises(UserError, match=r"20 prompts became 0 rows \(20 x rendered text without an answer of this"):
        prepare(make_recipe(sources={"tales": SourceConfig(path=str(path))}), lambda dtype: target)
    told = capsys.readouterr().out
    assert "20 x rendered text without an answer of this template (also tales-2, tales-3): tales-1: no " in told
    assert "0 foxes" in told and "1 foxes" not in told


def test_a_cache_that_cannot_be_written_is_refused(make_recipe: Maker, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot create the folder"):
        prepare(make_recipe(cache=str(tmp_path / "file" / "cache")), never)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        (SourceConfig(kind="magic"), "kind='magic' is not one of file, hub, self"),
        (SourceConfig(kind="file"), "path is empty"),
        (SourceConfig(kind="file", path="/none.jsonl"), r"data\.sources\.mine\.path: .*/none.jsonl does not exist"),
        (SourceConfig(kind="hub"), "path is empty"),
        (SourceConfig(kind="self"), "rows is 0"),
        (SourceConfig(kind="self", rows=5, temperatures=[0.0]), "same question"),
        (SourceConfig(kind="self", rows=5, openings=[]), "openings"),
        (SourceConfig(kind="self", rows=-5), "negative"),
    ],
)
def test_wrong_sources_are_refused_before_weights(make_recipe: Maker, source: SourceConfig, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        prepare(make_recipe(sources={"mine": source}), never)


@pytest.mark.parametrize(
    "changes", [{"temperatures": []}, {"temperatures": [-1.0]}, {"slots": 0}, {"dtype": "int8"}, {"sources": {}}]
)
def test_wrong_numbers_are_refused(make_recipe: Maker, changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"data.{next(iter(changes))}"):
        check_sources(make_recipe(**changes))


def test_cost_of_a_dry_run(make_recipe: Maker) -> None:
    sources = {
        **make_recipe().data.sources,
        "own": SourceConfig(kind="self", rows=10, max_tokens=50),
        "hub": SourceConfig(kind="hub", path="a/b"),
    }
    costs = check_sources(make_recipe(sources=sources))
    asked = costs[0].asked_tokens  # by the tokenizer, some letters a token, and the marks around a turn
    assert costs[0] == SourceCost("asked", "file", 12, 0, asked, 12 * 24, 0, 12 * 96 * 5) and 12 * 12 < asked < 12 * 24
    assert costs[1] == SourceCost("own", "self", 10, 13 * 50, 10 * 50, 240, 0, 10 * 96 * 5)
    table = SourceCost.table(costs)
    assert "total: 22 prompts, at most 1,178 generated tokens" in table and "hub (hub): as many prompts" in table


def test_a_dry_run_names_rows_that_would_be_left_out(make_recipe: Maker, prompt_file: Path) -> None:
    broken = prompt_file.with_name("broken.jsonl")
    broken.write_text(prompt_file.read_text() + '{"turns": [\n')
    table = SourceCost.table(check_sources(make_recipe(sources={"mine": SourceConfig(path=str(broken))})))
    assert "12 prompts" in table and "refused 1: not valid JSON (line 13: " in table


def test_too_few_prompts_are_told_before_they_are_answered(
    make_recipe: Maker, capsys: pytest.CaptureFixture[str]
) -> None:
    check(make_recipe(validation_rows=11))
    assert "warning" not in capsys.readouterr().out
    check(make_recipe(validation_rows=12))
    assert "warning: 12 prompts and data.validation_rows=12" in capsys.readouterr().out


def test_a_dry_run_refuses_what_the_data_would_be_kept_from(
    make_recipe: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mistakes that need neither weights nor a single generated token."""
    monkeypatch.setattr("data_prep.run.load_target", None)
    recipe = replace(make_recipe(), dry_run=True)
    (tmp_path / "file").write_text("")
    wrong = {
        "cannot create the folder": replace(recipe, data=replace(recipe.data, cache=str(tmp_path / "file" / "cache"))),
        "/no/such/model is neither": replace(recipe, target=TargetConfig(path="/no/such/model")),
        r"target\.taps=\[1, 2, 99\]": replace(recipe, target=replace(recipe.target, taps=[1, 2, 99])),
        "Did you mean 'report'": replace(recipe, eval=replace(recipe.eval, prompts="reprot")),
    }
    for complaint, changed in wrong.items():
        for dry_run in (True, False):
            with pytest.raises(UserError, match=complaint):
                main(replace(changed, dry_run=dry_run))
    assert not (tmp_path / "cache").exists()


def test_commands(tmp_path: Path, target_folder: Path, prompt_file: Path) -> None:
    """`python -m data_prep.run` from another working directory: dry run, the real thing, and a mistake."""
    path = tmp_path / "mine.yaml"
    path.write_text(
        f"target: {{path: {target_folder}}}\n"
        f"data: {{sources: {{asked: {{path: {prompt_file}}}}}, max_length: 64, answer_tokens: 8, validation_rows: 2}}\n"
        "eagle: {draft_vocab: 64}\n"
    )
    environment = {**os.environ, "ESPALIER_CACHE": str(tmp_path / "cache")}

    def command(*args: str) -> "subprocess.CompletedProcess[str]":
        line = [sys.executable, "-m", "data_prep.run", f"recipe={path}", *args]
        return subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    dry = command("dry_run=true")
    assert dry.returncode == 0 and "12 prompts" in dry.stdout and not (tmp_path / "cache").exists()
    real = command()
    assert real.returncode == 0 and "10 training rows" in real.stdout, real.stderr
    wrong = command("data.sources.asked.path=/none.jsonl")
    assert wrong.returncode == 2 and "does not exist" in wrong.stderr and "Traceback" not in wrong.stderr
