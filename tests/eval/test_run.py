"""`eval.run` from the command line: every mistake is one screen and exit code 2, and a run leaves whole results."""

import json
from pathlib import Path

import pytest
import torch

from eval import run
from eval.matrix import SuccessorMatrix
from eval.matrix_file import save_matrix
from models.eagle3 import Eagle3, Eagle3Config
from models.layouts import save_drafter
from models.target import load_target
from models.vocab import VocabMap
from recipes.cli import entry
from recipes.schema import TargetConfig
from tests.tiny import tiny_model_folder


class World:
    """A tiny target, a drafter of random weights for it, a recipe and a prompt file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tiny_model_folder(folder / "target")
        target = load_target(TargetConfig(path=str(folder / "target")), "cpu", torch.float32)
        drafter = Eagle3(
            Eagle3Config.from_target(target, VocabMap.identity(target.vocab_size)), VocabMap.identity(target.vocab_size)
        )
        save_drafter(drafter, folder / "drafter", {"fingerprint": target.fingerprint})
        (folder / "tiny.yaml").write_text(
            f"target: {{path: {folder / 'target'}}}\n"
            "eval: {max_new_tokens: 10, matrix: warm-2, nodes: 4, depth: 2, branch: 2, chain_length: 2, lossless: 2}\n"
        )
        lines = [{"id": f"p{i}", "category": "abc"[i % 3], "turns": ["the quick fox " * (i + 1)]} for i in range(4)]
        lines[0]["turns"] = ["a b c", "d e f"]
        (folder / "prompts.jsonl").write_text("\n".join(json.dumps(line) for line in lines))

    def arguments(self, *extra: str) -> list[str]:
        given = [f"recipe={self.folder / 'tiny.yaml'}", f"drafter={self.folder / 'drafter'}"]
        given += [f"prompts={self.folder / 'prompts.jsonl'}", f"out={self.folder / 'out'}"]
        names = {argument.partition("=")[0] for argument in extra}
        return [argument for argument in given if argument.partition("=")[0] not in names] + list(extra)


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


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("eval.temperature=-1", "eval.temperature=-1.0: must be 0 or more"),
        ("eval.top_p=1.2", "eval.top_p=1.2: must be above 0 and at most 1"),
        ("eval.nodes=0", "eval.nodes=0: must be 1 or more"),
        ("eval.depth=0", "eval.depth=0"),
        ("eval.branch=0", "eval.branch=0"),
        ("eval.max_new_tokens=0", "eval.max_new_tokens=0"),
        ("decoder=eagel", "decoder='eagel'"),
        ("eval.matrix=warm", "cold, carried or warm-N"),
        ("eval.matrix=warm-99", "Use warm-18 or carried"),
        ("eval.matrix=nowhere.safetensors", "eval.matrix=nowhere.safetensors: no such file"),
        ("prompts=nowhere.jsonl", "nowhere.jsonl does not exist"),
        ("drafter=nowhere", "drafter=nowhere: no such folder"),
        ("eval.repetition_penalty=1.1", "'eval.repetition_penalty' is refused"),
        ("eval.dtype=int8", "eval.dtype='int8'"),
    ],
)
def test_mistakes_are_refused_before_weights_load(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, extra: str, words: str
) -> None:
    monkeypatch.setattr(run, "load_target", None)
    assert words in refused(world, capsys, extra)


def test_a_broken_prompt_line_is_named(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    broken = world.folder / "broken.jsonl"
    broken.write_text('{"id": "a", "turns": ["hi"]}\n{"id": "b", "turns": \n')
    assert "line 2" in refused(world, capsys, f"prompts={broken}")


def test_a_drafter_for_another_target_is_refused(
    world: World, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for name in ("config.json", "model.safetensors"):
        (other / name).write_bytes((world.folder / "drafter" / name).read_bytes())
    (other / "provenance.json").write_text('{"fingerprint": "feedbeef"}')
    assert "another target" in refused(world, capsys, f"drafter={other}")
    (other / "model.safetensors").unlink()
    assert "no model.safetensors" in refused(world, capsys, f"drafter={other}")


def test_a_dry_run_shows_the_plan_and_writes_nothing(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "load_target", None)
    entry(run.main, world.arguments("dry_run=true", f"out={world.folder / 'dry'}"))
    shown = capsys.readouterr().out
    assert "4 prompts, 5 turns, max_new_tokens 10: at most 50 tokens a decoder" in shown
    assert "graft: 4 nodes, depth 2, top-2" in shown
    assert not (world.folder / "dry").exists()


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


def test_tuned_settings_are_kept_beside_the_drafter_and_used_again(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    entry(run.main, world.arguments("eval.tune=true", "eval.limit=2"))
    assert (world.folder / "drafter" / "tuned.json").is_file()
    assert "tuned in" in capsys.readouterr().out
    entry(run.main, world.arguments("eval.tune=true", "eval.limit=2"))
    assert "tuned in" not in capsys.readouterr().out
    assert "measured cost curve" in (world.folder / "out" / "report.md").read_text()


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
