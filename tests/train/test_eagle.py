"""The entry point, from a prompt file to a measured drafter, on a tiny random target."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from data_prep.run import main as prepare_data
from models.eagle3 import Eagle3, Eagle3Config
from models.layouts import load_drafter
from models.target import Target
from models.vocab import VocabMap
from recipes.files import locked
from recipes.loading import load
from recipes.schema import EagleConfig, UserError
from tests.train.reading import curve
from tests.train.tiny_recipe import recipe, written
from train.checkpoint import Store
from train.cost import parameters
from train.eagle import main

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def arguments(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    changes = """
data: {slots: 8, validation_rows: 4}
eagle: {draft_vocab: 200, unroll_steps: 3}
train: {epochs: 2}
eval: {decoders: [ar, chain], chain_length: 3, depth: 3, lossless: -1}
"""
    return written(tmp_path_factory.mktemp("files"), model_folder, 24, 3, changes)


@pytest.fixture(scope="module")
def run_dir(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    main(recipe(arguments, folder))
    return folder


def test_the_run_folder_holds_what_it_should(run_dir: Path, target: Target) -> None:
    store = Store(run_dir)
    summary = json.loads((run_dir / "summary.json").read_text())
    best = store.named("best")
    assert best == summary["best_step"] and len(summary["scores"]) == 2
    assert all(tau >= 1 for tau in summary["scores"].values())
    results = run_dir / "eval" / f"step-{best}"
    assert (results / "results.json").is_file() and (results / "report.md").is_file()
    papers = json.loads((run_dir / "provenance.json").read_text())
    assert papers["target"]["fingerprint"] == target.fingerprint and papers["versions"]["torch"] == torch.__version__
    assert (run_dir / "data" / "report.json").is_file() and (run_dir / "recipe.yaml").is_file()
    assert summary["packing"]["padding"] == 0 and 0.5 < summary["packing"]["filled"] <= 1
    assert set(curve(run_dir, "padding")) == {0.0}
    assert curve(run_dir, "step")[0] == 1 and len(curve(run_dir, "validation_tau")) == 2


def test_the_exported_drafter_is_the_best_checkpoint(run_dir: Path, target: Target) -> None:
    store = Store(run_dir)
    best = store.named("best")
    assert best is not None
    exported = load_drafter(run_dir / "drafter", target)
    for name, tensor in store.model(best).items():
        torch.testing.assert_close(exported.get_parameter(name).detach(), tensor)


def test_the_drafter_has_a_card_that_can_be_published(run_dir: Path, target: Target) -> None:
    page = (run_dir / "drafter" / "README.md").read_text()
    papers = json.loads((run_dir / "drafter" / "provenance.json").read_text())
    results = json.loads((run_dir / "eval" / f"step-{papers['step']}" / "results-chain.json").read_text())
    row = {row["decoder"]: row for row in papers["measured"]}["chain"]
    assert row["tau"] == results["overall"]["tau"] and papers["recipe"]["train"]["epochs"] == 2
    assert f"{row['tau']:.2f} [" in page and "max_new_tokens 12" in page and target.fingerprint in page
    assert "vllm serve" in page and "EAGLE3" in page
    assert "training.jsonl" in page and papers["target"]["path"] == target.folder.name
    for text in (page, json.dumps(papers), (run_dir / "drafter" / "config.json").read_text()):
        assert str(run_dir.parent) not in text and "/tmp" not in text and str(target.folder) not in text


def test_the_same_command_again_says_that_the_run_is_finished(
    arguments: list[str], run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (run_dir / "metrics.jsonl").read_bytes()
    main(recipe(arguments, run_dir))
    assert "this run is finished: 4 steps (its data: they are the same)" in capsys.readouterr().out
    assert (run_dir / "metrics.jsonl").read_bytes() == before


def test_a_finished_run_whose_data_have_changed_is_not_passed_off_as_this_one(
    arguments: list[str], run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = recipe(arguments, run_dir)
    source = Path(asked.data.sources["mine"].path)
    text = source.read_text()
    source.write_text("".join(text.splitlines(keepends=True)[:-1]))
    try:
        main(asked)
        assert "its data: none are prepared for the sources as they are now" in capsys.readouterr().out
        prepare_data(asked)
        with pytest.raises(UserError, match=r"data\.hash: was \w+, now \w+\n  data\.rows: was"):
            main(asked)
    finally:
        source.write_text(text)


def test_a_changed_recipe_is_refused_before_and_after_the_end(arguments: list[str], run_dir: Path) -> None:
    changed = recipe(arguments, run_dir, "train.learning_rate=0.002")
    with pytest.raises(UserError, match=r"train\.learning_rate: was 0\.001, now 0\.002"):
        main(changed)
    summary = run_dir / "summary.json"
    text = summary.read_text()
    summary.unlink()
    try:
        with pytest.raises(UserError, match=r"train\.learning_rate: was 0\.001, now 0\.002"):
            main(changed)
    finally:
        summary.write_text(text)


def test_a_dry_run_refuses_another_runs_folder_finished_or_not(
    arguments: list[str], run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so does the real run, before it loads the target or prepares anything."""
    monkeypatch.setattr("train.run.load_target", None)
    begun = tmp_path / "begun"
    shutil.copytree(run_dir / "checkpoints", begun / "checkpoints")
    for folder in (run_dir, begun):
        for dry_run in ("true", "false"):
            with pytest.raises(UserError, match=r"train\.learning_rate: was 0\.001, now 0\.002"):
                main(recipe(arguments, folder, "train.learning_rate=0.002", f"dry_run={dry_run}"))
        main(recipe(arguments, folder, "dry_run=true"))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("target.path=/no/such/model", "/no/such/model is neither a folder"),
        ("eval.max_new_tokens=600", "leaves no room for a prompt: the target has 512 positions"),
        ("eval.prompts=reprot", "Did you mean 'report'"),
        (
            "eval.matrix=none.safetensors",
            r"eval\.matrix=none\.safetensors: no such file",
        ),
        ("eval.matrix=warm-99", r"eval\.matrix=warm-99: only \d+ warm-up prompts"),
        ("eval.prompts=", r"eval\.prompts is empty"),
        (
            "data.sources.mine.path=none.jsonl",
            r"data\.sources\.mine\.path: .* none\.jsonl does not exist in /",
        ),
    ],
)
@pytest.mark.parametrize("dry_run", ["true", "false"])
def test_a_mistake_is_refused_before_the_target_loads_and_in_a_dry_run(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, words: str, dry_run: str
) -> None:
    monkeypatch.setattr("train.run.load_target", None)
    with pytest.raises(UserError, match=words):
        main(recipe(arguments, tmp_path / "none", given, f"dry_run={dry_run}"))
    assert not (tmp_path / "none").exists()


def test_ctrl_c_leaves_a_run_that_goes_on(
    arguments: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = ["train.epochs=40", "train.save_every=1"]
    line = [sys.executable, str(ROOT / "train" / "eagle.py"), *arguments, f"run_dir={tmp_path / 'a' / 'run'}", *given]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as run:
        assert run.stdout is not None and run.stderr is not None
        next(text for text in run.stdout if text.startswith("step 3"))
        run.send_signal(signal.SIGINT)
        error = run.stderr.read()
    assert run.returncode == 130
    assert error.splitlines()[-1].startswith("interrupted: ") and "Traceback" not in error
    main(recipe(arguments, tmp_path / "a" / "run", *given, "dry_run=true"))
    assert not [p for p in tmp_path.rglob(".*") if p.is_dir()], "nothing half-written"
    step = Store(tmp_path / "a" / "run").latest()
    assert step is not None and step >= 2
    with pytest.raises(UserError, match="seed: was 0, now 1"):
        main(recipe(arguments, tmp_path / "a" / "run", *given, "seed=1"))


def test_a_folder_that_another_run_trains_in_is_refused(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.run.load_target", None)
    folder = tmp_path / "run"
    with locked(folder, "training"), pytest.raises(UserError, match=r"run: another process is training in this folder"):
        main(recipe(arguments, folder))


def test_a_kill_during_the_evaluation_costs_only_that(
    arguments: list[str], run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_dir / "summary.json").unlink()
    metrics = (run_dir / "metrics.jsonl").read_text()
    main(recipe(arguments, run_dir))
    assert "resuming" in capsys.readouterr().out
    assert (run_dir / "metrics.jsonl").read_text() == metrics
    assert (run_dir / "summary.json").is_file()


def test_a_run_from_states_on_disk_writes_them_first_and_no_second_run_does(
    arguments: list[str], run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["train.max_steps=3", "eval.decoders=[ar]", "data.states=fp8"]
    main(recipe(arguments, tmp_path / "first", *few))
    assert "shards, 0 to be made" not in capsys.readouterr().out
    assert curve(tmp_path / "first", "loss") == pytest.approx(curve(run_dir, "loss")[:3], rel=0.02)
    main(recipe(arguments, tmp_path / "second", *few, "train.max_steps=2"))
    assert "shards, 0 to be made" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"data\.states: was 'fp8', now 'none'"):
        main(recipe(arguments, tmp_path / "first", "train.max_steps=3", "eval.decoders=[ar]"))


def test_dry_run_prints_cost_and_writes_nothing(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(recipe(arguments, tmp_path / "none", "dry_run=true"))
    out = capsys.readouterr().out
    assert "24 rows" in out and "trained parameters" in out and "learning_rate: 0.001" in out
    assert not (tmp_path / "none").exists()


def test_a_draft_vocabulary_above_the_targets_is_told_and_counted_as_the_targets(
    arguments: list[str], tmp_path: Path, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for size in (target.vocab_size, target.vocab_size + 1):
        main(recipe(arguments, tmp_path / "none", "dry_run=true", f"eagle.draft_vocab={size}"))
        said.append(capsys.readouterr().out)
    assert "the drafter will have them all" not in said[0]
    assert f"draft_vocab={target.vocab_size + 1}: the target has {target.vocab_size} tokens, and the drafter" in said[1]
    counted = [next(line for line in text.splitlines() if "trained parameters" in line) for text in said]
    assert counted[0] == counted[1]


@pytest.mark.parametrize(
    "on", [(), ("fc_norm", "qk_norm"), ("norm_before_fc",), ("norm_output", "norm_before_residual")]
)
def test_parameters_are_counted_right(target: Target, on: tuple[str, ...]) -> None:
    flags, vocab = dict.fromkeys(on, True), VocabMap.from_ids(list(range(200)), target.vocab_size)
    drafter = Eagle3(Eagle3Config.from_target(target, vocab, **flags), vocab)
    cfg = load(["recipe=smollm2", "eagle.draft_vocab=200", *(f"eagle.{flag}=true" for flag in on)]).eagle
    assert parameters(target.config.to_dict(), cfg, 3) == sum(p.numel() for p in drafter.parameters())
    config: dict[str, Any] = AutoConfig.for_model("qwen3", hidden_size=64, num_attention_heads=4, head_dim=32).to_dict()
    assert parameters(config, EagleConfig(draft_vocab=0), 3) > parameters(config, cfg, 3)


def command(*arguments: str, cwd: Path, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}
    environment |= {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    line = [sys.executable, *launcher, str(ROOT / "train" / "eagle.py"), *arguments]
    return subprocess.run(line, capture_output=True, text=True, env=environment, cwd=cwd, timeout=300)


def test_from_any_folder_and_a_mistake_is_one_screen_and_exit_2(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = command(*arguments, "run_dir=file/run", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("error: cannot create the folder file/run")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("config", ["ddp.yaml", pytest.param("zero3.yaml", marks=pytest.mark.slow)])
def test_two_processes_end_to_end(config: str, arguments: list[str], run_dir: Path, tmp_path: Path) -> None:
    """Rank 0 prepares, evaluates and exports, under ZeRO-3 with a target that both hold a part of; the curve and the
    best drafter's tau are those of one process."""
    launcher = ("-m", "accelerate.commands.launch", "--config_file", f"{ROOT}/recipes/accelerate/{config}")
    done = command(*arguments, "run_dir=two", cwd=tmp_path, launcher=launcher)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    assert curve(tmp_path / "two", "loss") == pytest.approx(curve(run_dir, "loss"), abs=1e-4)
    assert (tmp_path / "two" / "drafter" / "config.json").is_file()
    scores = [json.loads((folder / "summary.json").read_text())["scores"] for folder in (tmp_path / "two", run_dir)]
    assert scores[0] == pytest.approx(scores[1], abs=0.05)
    refused = command(*arguments, "run_dir=two", "seed=3", cwd=tmp_path, launcher=launcher)
    assert refused.returncode != 0
    assert refused.stderr.count("error: two holds a run that differs") == 1
    assert "seed: was 0, now 3" in refused.stderr


@pytest.mark.slow
def test_a_deepspeed_file_that_scales_the_loss_is_refused(arguments: list[str], tmp_path: Path) -> None:
    settings = {"fp16": {"enabled": True}, "zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1}
    (tmp_path / "ds.json").write_text(json.dumps(settings))
    with_file = ("--use_deepspeed", "--deepspeed_config_file", "ds.json", "--num_processes", "1")
    launcher = ("-m", "accelerate.commands.launch", *with_file)
    done = command(*arguments, "run_dir=run", cwd=tmp_path, launcher=launcher)
    assert done.returncode != 0 and not (tmp_path / "run").exists()
    assert "error: fp16 is enabled in the DeepSpeed file" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("config", ["ddp.yaml", "zero3.yaml"])
def test_two_processes_write_and_read_states_on_disk(arguments: list[str], tmp_path: Path, config: str) -> None:
    """Each writes its share, the target sharded or not, and reads its own rows; the curve is that of one process."""
    launcher = ("-m", "accelerate.commands.launch", "--config_file", f"{ROOT}/recipes/accelerate/{config}")
    more = ["data.states=bf16", "train.epochs=1", "eval.decoders=[ar]"]
    done = command(*arguments, *more, f"data.cache={tmp_path}", "run_dir=two", cwd=tmp_path, launcher=launcher)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    assert done.stdout.count("tokens written in") == 2
    done = command(*arguments, *more, f"data.cache={tmp_path}", "run_dir=one", cwd=tmp_path)
    assert done.returncode == 0 and "shards, 0 to be made" in done.stdout
    assert curve(tmp_path / "two", "loss") == pytest.approx(curve(tmp_path / "one", "loss"), abs=1e-4)
