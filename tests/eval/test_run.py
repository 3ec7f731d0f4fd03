"""`eval.run` from the command line: every mistake is one screen and exit code 2, and a run leaves whole results."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eval import calibrate, chat, run, tune
from eval.matrix import SuccessorMatrix
from eval.matrix_file import save_matrix
from models.layouts import Verifier, save_drafter
from models.target import load_target
from recipes.cli import entry
from recipes.schema import Recipe, TargetConfig
from tests.eval.world import World
from tests.tiny import tiny_drafter


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


def refused(world: World, capsys: pytest.CaptureFixture[str], *extra: str) -> str:
    out = world.folder / "refused"
    with pytest.raises(SystemExit) as stop:
        entry(run.main, world.arguments(*extra, f"out={out}"))
    assert stop.value.code == 2
    assert not out.exists()
    error = capsys.readouterr().err
    assert error.count("\n") < 20
    return error


@pytest.mark.parametrize("dry_run", ["true", "false"])
@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("eval.temperature=-1", "eval.temperature=-1.0: must be 0 or more"),
        ("eval.top_p=1.2", "eval.top_p=1.2: must be above 0 and at most 1"),
        ("eval.nodes=0", "eval.nodes=0: must be 1 or more"),
        ("eval.depth=0", "eval.depth=0"),
        ("eval.branch=0", "eval.branch=0"),
        ("eval.max_new_tokens=0", "eval.max_new_tokens=0"),
        ("decoder=eagel", "Did you mean 'eagle'?"),
        ("eval.max_new_tokens=600", "leaves no room for a prompt: the target has 512 positions"),
        ("eval.max_prompt=3", "every prompt is longer than 3 tokens"),
        ("target.path=/no/such/model", "/no/such/model is neither a folder"),
        ("target.taps=[1,2,99]", "target.taps=[1, 2, 99]"),
        ("eval.matrix=warm", "cold, carried or warm-N"),
        ("eval.matrix=warm-99", "Use warm-18 or carried"),
        ("eval.matrix=nowhere.safetensors", "eval.matrix=nowhere.safetensors: no such file"),
        ("prompts=reprot", "Did you mean 'report'?"),
        ("prompts=nowhere.jsonl", "'nowhere.jsonl': there is no such file"),
        ("drafter=nowhere", "drafter=nowhere: no such folder"),
        ("eval.repetition_penalty=1.1", "'eval.repetition_penalty' is refused"),
        ("eval.dtype=int8", "eval.dtype='int8'"),
        ("eval.batch_size=0", "eval.batch_size=0: must be 1 or more"),
        ("eval.batch_sizes=[1,0]", "eval.batch_sizes=[1, 0]: must be numbers of 1 or more"),
    ],
)
def test_mistakes_are_refused_before_weights_load(
    world: World,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    extra: str,
    words: str,
    dry_run: str,
) -> None:
    monkeypatch.setattr(run, "load_target", None)
    assert words in refused(world, capsys, extra, f"dry_run={dry_run}")


@pytest.mark.parametrize("dry_run", ["true", "false"])
@pytest.mark.parametrize("command", [run.main, tune.main, calibrate.main])
def test_a_folder_that_cannot_be_written_to_is_refused_before_weights_load(
    world: World,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: Callable[[Recipe], None],
    dry_run: str,
) -> None:
    monkeypatch.setattr(run, "load_target", None)
    arguments = world.arguments if command is run.main else world.beside
    closed = world.folder / ("drafter" if command is not run.main else "")
    monkeypatch.setattr(os, "access", lambda path, mode: path != closed)  # as root, everything may be written to
    with pytest.raises(SystemExit) as stop:
        entry(command, arguments(f"out={closed / 'new'}", f"dry_run={dry_run}"))
    assert stop.value.code == 2
    assert f"no permission to write to the folder {closed}" in capsys.readouterr().err


@pytest.mark.parametrize("dry_run", ["true", "false"])
@pytest.mark.parametrize("command", [run.main, tune.main, chat.main])
def test_a_damaged_tuned_json_is_refused_before_weights_load(
    world: World,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: Callable[[Recipe], None],
    dry_run: str,
) -> None:
    monkeypatch.setattr(run, "load_target", None)
    arguments = world.arguments if command is run.main else world.beside
    damaged = world.folder / "drafter" / "tuned.json"
    damaged.write_text('{"schema": 3, "entries": {"batch 1, T = 0": ')
    try:
        with pytest.raises(SystemExit) as stop:
            entry(command, arguments("eval.tune=true", f"dry_run={dry_run}"))
    finally:
        damaged.unlink()
    assert stop.value.code == 2
    assert f"{damaged} is not a tuned.json of ours" in capsys.readouterr().err


@pytest.mark.parametrize("more", ["", "dry_run=true"])
def test_eval_tune_refuses_a_rule_that_cannot_judge_before_weights_load(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, more: str
) -> None:
    monkeypatch.setattr(run, "load_target", None)
    given = ("verifier=block", "eval.temperature=1.0", "eval.paths=2", *filter(None, [more]))
    with pytest.raises(SystemExit) as stop:
        entry(tune.main, world.beside("decoder=chain", *given))
    assert stop.value.code == 2
    assert "block judges one path, and eval.paths=2 are drafted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "key"),
    [(command, key) for command in (tune.main, calibrate.main, chat.main) for key in ("prompts", "out")]
    + [(calibrate.main, "decoder")],
)
def test_what_a_command_does_not_read_is_refused(
    world: World, capsys: pytest.CaptureFixture[str], command: Callable[[Recipe], None], key: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        entry(command, [*world.beside(), f"{key}=graft"])
    assert stop.value.code == 2 and f"{key}=graft" in (said := capsys.readouterr().err)
    assert "does not read that. Leave it out" in said


def test_plain_decoding_has_nothing_to_tune(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        entry(tune.main, world.beside("decoder=ar"))
    assert stop.value.code == 2 and "has nothing to tune" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        entry(tune.main, world.beside("eval.max_new_tokens=1"))
    assert stop.value.code == 2 and "no round is left to time" in capsys.readouterr().err


def test_a_broken_prompt_line_is_named(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    broken = world.folder / "broken.jsonl"
    broken.write_text('{"id": "a", "turns": ["hi"]}\n{"id": "b", "turns": \n')
    assert "line 2" in refused(world, capsys, f"prompts={broken}")


@pytest.mark.parametrize("layout", ["sglang", "speculators"])
def test_a_drafter_of_another_layout_is_measured_with_the_states_that_it_reads(
    world: World, tmp_path: Path, layout: str
) -> None:
    """Its taps are its own, whatever the recipe says; EAGLE 3.1's norms; lossless, so decoded as it should be."""
    cfg = TargetConfig(path=str(world.folder / "target"), taps=[1, 3, 6])
    target = load_target(cfg, "cpu", torch.float32)
    drafter = tiny_drafter(target, list(range(0, 320, 2)), fc_norm=True, norm_output=True)
    verifier = Verifier("some/target", ["LlamaForCausalLM"], target.embed_weight)
    papers = {"fingerprint": target.fingerprint}
    save_drafter(drafter, tmp_path / "d", papers, layout=layout, verifier=verifier)
    given = world.arguments(f"drafter={tmp_path / 'd'}", f"out={tmp_path / 'out'}", "decoder=chain")
    entry(run.main, [*given, "eval.limit=2"])
    overall = json.loads((tmp_path / "out" / "results.json").read_text())["overall"]
    assert overall["prompts"] == 2
    lossless = overall["lossless"]
    assert lossless["checked"] == 2 and lossless["identical"] + lossless["near_ties"] == 2


@pytest.mark.parametrize("dry_run", ["true", "false"])
def test_a_drafter_for_another_target_is_refused(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dry_run: str
) -> None:
    monkeypatch.setattr(run, "load_target", None)
    other = tmp_path / "other"
    other.mkdir()
    for name in ("config.json", "model.safetensors"):
        (other / name).write_bytes((world.folder / "drafter" / name).read_bytes())
    (other / "provenance.json").write_text('{"fingerprint": "feedbeef"}')
    assert "another target" in refused(world, capsys, f"drafter={other}", f"dry_run={dry_run}")
    (other / "model.safetensors").unlink()
    assert "no model.safetensors" in refused(world, capsys, f"drafter={other}", f"dry_run={dry_run}")
    words = f"no config.json there, so it is not an exported drafter. Did you mean drafter={world.folder / 'drafter'}?"
    assert words in refused(world, capsys, f"drafter={world.folder}", f"dry_run={dry_run}")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 16}, "is for hidden size 16 and vocabulary 320, the target has 32 and 320"),
        ({"vocab_size": 300}, "is for hidden size 32 and vocabulary 300"),
        ({"draft_vocab_size": 64}, "d2t is missing"),
        ({"intermediate_size": 16}, "of wrong shape ['midlayer.mlp.down_proj.weight'"),
    ],
)
@pytest.mark.parametrize("dry_run", ["true", "false"])
def test_a_drafter_that_does_not_fit_is_refused_before_weights_load(
    world: World,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    changes: dict[str, int],
    words: str,
    dry_run: str,
) -> None:
    monkeypatch.setattr(run, "load_target", None)
    other = tmp_path / "other"
    shutil.copytree(world.folder / "drafter", other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | changes))
    assert words in refused(world, capsys, f"drafter={other}", f"dry_run={dry_run}")


def test_an_empty_prompt_is_named_and_the_others_answered(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    empty = world.folder / "empty.jsonl"
    empty.write_text('{"turns": [""]}\n{"id": "a", "turns": ["hi"]}\n{"turns": [" "]}')
    entry(run.main, world.arguments(f"prompts={empty}", f"out={world.folder / 'others'}"))
    assert "2 left out, with an empty turn (line 1, line 3)" in capsys.readouterr().out
    (row,) = json.loads((world.folder / "others" / "results-ar.json").read_text())["per_prompt"]
    assert row["id"] == "a" and row["tokens"] > 0
    for lines in ('{"turns": [""]}', '{"id": "a", "turns": ["hi"]}\n{"turns": []}'):
        empty.write_text(lines)
        assert "line " in refused(world, capsys, f"prompts={empty}")


def test_prompts_beyond_the_models_limit_are_named_and_the_others_answered(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    mixed = world.folder / "mixed.jsonl"
    lines = [{"id": "long", "turns": ["fox " * 600]}, {"id": "short", "category": "a|b\nc", "turns": ["a b c"]}]
    mixed.write_text("\n".join(map(json.dumps, lines)))
    entry(run.main, world.arguments(f"prompts={mixed}", "decoder=chain", "eval.lossless=-1"))
    assert "prompts: 1 of 2 left out, longer than 486 tokens (long)" in capsys.readouterr().out
    report = (world.folder / "out" / "report.md").read_text()
    assert "| a/b c | 1 |" in report, "a category's name leaves the table whole"
    result = json.loads((world.folder / "out" / "results.json").read_text())
    assert [row["id"] for row in result["per_prompt"]] == ["short"]
    assert [(row["id"], row["limit"]) for row in result["skipped"]] == [("long", 512 - 10 - 16)]
    mixed.write_text(json.dumps(lines[0]))
    assert "every prompt is longer than 486 tokens" in refused(world, capsys, f"prompts={mixed}")
    too_much = refused(world, capsys, "eval.max_new_tokens=600")
    assert "eval.max_new_tokens=600 leaves no room for a prompt: the target has 512 positions" in too_much


def test_a_dry_run_shows_the_plan_and_writes_nothing(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "load_target", None)
    entry(run.main, world.arguments("dry_run=true", f"out={world.folder / 'dry'}"))
    shown = capsys.readouterr().out
    assert "4 prompts, 5 turns, max_new_tokens 10: at most 50 tokens a decoder" in shown
    assert "graft: 4 nodes, depth 2, top-2" in shown
    assert not (world.folder / "dry").exists()


def test_what_is_said_of_tuning_is_what_is_tuned(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    for decoder, said in (("graft", True), ("lookup", False)):
        entry(run.main, world.arguments(f"decoder={decoder}", "eval.tune=true", "dry_run=true"))
        assert ("settings are tuned first" in capsys.readouterr().out) == said


def test_a_run_is_lossless_and_whole(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    entry(run.main, world.arguments())
    shown = capsys.readouterr().out
    assert "max_new_tokens 10" in shown
    result = json.loads((world.folder / "out" / "results.json").read_text())
    assert result["decoder"] == "graft" and result["schema"] == 1
    overall = result["overall"]
    assert overall["lossless"]["checked"] == 4
    assert overall["lossless"]["identical"] + overall["lossless"]["near_ties"] == 4
    assert result["checks"]["generate"]["checked"] == 2 and not result["checks"]["generate"]["diverged"]
    assert set(overall["ms_per_round"]) == {"draft", "retrieve", "verify", "accept", "cache"}
    assert set(result["categories"]) == {"a", "b", "c"}
    assert [row["turns"] for row in result["per_prompt"]] == [2, 1, 1, 1]
    assert not [path for path in (world.folder / "out").iterdir() if path.name.startswith(".")]
    page = (world.folder / "out" / "report.md").read_text()
    assert "NOT LOSSLESS" not in page


def test_a_run_tunes_for_itself_and_uses_what_eval_tune_left_beside_the_drafter(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    beside = world.folder / "drafter" / "tuned.json"
    entry(run.main, world.arguments("eval.tune=true", "eval.limit=2", "eval.decoders=[chain]"))
    assert "tuned in" in capsys.readouterr().out
    assert (world.folder / "out" / "tuned.json").is_file() and not beside.exists()
    entry(tune.main, world.beside("eval.batch_sizes=[1,2]", "eval.decoders=[chain]"))
    assert capsys.readouterr().out.count("below the best of the grid") == 2
    entries = json.loads(beside.read_text())["entries"]
    assert set(entries) == {"batch 1, T = 0", "batch 2, T = 0"}
    assert all("contexts" in tuning for tuning in entries.values())
    entry(run.main, world.arguments("eval.tune=true", "eval.limit=2", "eval.decoders=[chain]"))
    assert "tuned in" not in capsys.readouterr().out
    page = world.folder / "out" / "report.md"
    assert "measured cost curve" in page.read_text()
    for given, used in ((), True), (("eval.tune=false",), False):
        entry(run.main, world.arguments("eval.limit=1", "eval.decoders=[chain]", "eval.lossless=-1", *given))
        assert ("measured cost curve" in page.read_text()) == used
    entry(run.main, world.arguments("eval.decoders=[chain]", "dry_run=true"))
    assert "those of the drafter's tuned.json" in capsys.readouterr().out
    beside.unlink()


def test_a_sweep_and_the_picture_of_a_tree_are_in_the_report(world: World) -> None:
    entry(run.main, world.arguments("eval.batch_sizes=[1,3]", "eval.lossless=-1"))
    out = world.folder / "out"
    sizes = json.loads((out / "batches.json").read_text())["sizes"]
    assert [size["batch_size"] for size in sizes] == [1, 3]
    assert set(sizes[1]["decoders"]) == {"ar", "chain", "eagle", "graft", "graft-cold"}
    page = (out / "report.md").read_text()
    assert "## By batch size" in page and "(tree.png)" in page
    assert (out / "tree.png").is_file()


def test_sampling_and_batches_run(world: World) -> None:
    entry(run.main, world.arguments("eval.temperature=1.0", "eval.batch_size=3", "decoder=eagle", "eval.top_p=0.9"))
    result = json.loads((world.folder / "out" / "results.json").read_text())
    assert result["decoder"] == "eagle"
    assert result["overall"]["lossless"]["checked"] == 0
    assert result["settings"]["batch_size"] == 3


def test_plain_decoding_needs_no_drafter(world: World) -> None:
    entry(run.main, world.arguments("decoder=ar", "drafter=nowhere"))
    assert json.loads((world.folder / "out" / "results.json").read_text())["decoder"] == "ar"


@pytest.mark.parametrize("decoder", ["recycle", "lookup", "suffix"])
def test_retrieval_alone_needs_no_drafter(world: World, decoder: str) -> None:
    entry(run.main, world.arguments(f"decoder={decoder}", "drafter=nowhere"))
    result = json.loads((world.folder / "out" / "results.json").read_text())
    overall = result["overall"]
    assert result["decoder"] == decoder and overall["lossless"]["checked"] == 4
    assert overall["lossless"]["identical"] + overall["lossless"]["near_ties"] == 4
    assert overall["accepted_by_source"]["drafter"] == 0
    assert result["settings"]["matrix"] == ("warm-2" if decoder == "recycle" else "none")


def test_a_matrix_of_another_target_is_refused_before_weights_load(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "load_target", None)
    file = world.folder / "other.safetensors"
    save_matrix(SuccessorMatrix(320), file, "feedbeef")
    assert "was learnt from another target" in refused(world, capsys, f"eval.matrix={file}")


def test_a_second_run_into_the_same_folder_leaves_nothing_of_the_first(world: World, tmp_path: Path) -> None:
    out = tmp_path / "out"
    entry(run.main, world.arguments(f"out={out}", "decoder=graft", "eval.batch_sizes=[1]", "eval.lossless=-1"))
    (out / "results-mine.json").write_text("not ours")
    assert (out / "batches.json").is_file() and (out / "results-graft-cold.json").is_file()
    entry(run.main, world.arguments(f"out={out}", "decoder=ar", "eval.lossless=-1"))
    assert {p.name for p in out.iterdir()} == {
        "results.json", "results-ar.json", "results-mine.json", "report.md", "report.png"
    }  # fmt: skip


def test_results_beside_a_drafter_leave_what_the_tuner_wrote_there(world: World, tmp_path: Path) -> None:
    out = tmp_path / "drafter"
    shutil.copytree(world.folder / "drafter", out)
    (out / "tuned.json").write_text('{"schema": 2, "batches": {}}')
    for _ in range(2):
        entry(run.main, world.arguments(f"drafter={out}", f"out={out}", "decoder=chain", "eval.lossless=-1"))
    assert (out / "tuned.json").is_file() and (out / "model.safetensors").is_file()


def test_a_rule_that_cannot_be_honoured_is_refused_before_tuning_loads_weights(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "load_target", None)
    for command in (tune.main, calibrate.main):
        with pytest.raises(SystemExit) as stop:
            entry(command, world.beside("verifier=spectr"))
        assert stop.value.code == 2 and "verifier=spectr needs the law" in capsys.readouterr().err
