"""FlexDraft's entry points, from a prompt file to a measured drafter and its calibrator, on a tiny random target."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from data_prep.rows import make_rows
from eval import calibrate
from eval import run as evaluation
from models.flex_layout import check_flexdraft, load_flexdraft
from models.flexdraft import FlexDraft, FlexDraftConfig
from models.target import Target
from recipes.files import read_json, write_json
from recipes.schema import UserError
from tests.train import tiny_run
from tests.train.reading import curve
from tests.train.test_flexdraft import objective
from tests.train.tiny_recipe import recipe, written
from train import calibrator, eagle, flexdraft
from train.backend import make_accelerator
from train.checkpoint import Store
from train.cost import calibrator_cost, flexdraft_cost

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def arguments(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    changes = """
data: {validation_rows: 2}
flex: {layers: 3, block_size: 4, anchors: 3, calibrator_rank: 8}
eval: {lossless: 0}
"""
    return written(tmp_path_factory.mktemp("files"), model_folder, 12, 2, changes)


@pytest.fixture(scope="module")
def run_dir(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    flexdraft.main(recipe(arguments, folder))
    return folder


@pytest.fixture(scope="module")
def calibrated(arguments: list[str], run_dir: Path) -> Path:
    folder = run_dir.parent / "calibrated"
    calibrator.main(recipe(arguments, folder, f"flexdraft={run_dir}"))
    return folder


def test_a_run_ends_in_a_measured_drafter_that_loads(run_dir: Path, target: Target) -> None:
    summary = json.loads((run_dir / "summary.json").read_text())
    assert [row["decoder"] for row in summary["decoders"]] == ["ar", "chain", "graft", "flex"]
    assert len(curve(run_dir, "simulated_tau")) == summary["steps"] and curve(run_dir, "validation_tau")
    results = run_dir / "eval" / f"step-{summary['best_step']}"
    overall = json.loads((results / "results-flex.json").read_text())["overall"]
    assert overall["lossless"] == {"checked": 2, "identical": 2, "near_ties": 0} and overall["tau"] >= 1
    drafter = load_flexdraft(run_dir / "drafter", target)
    for name, tensor in Store(run_dir).model(summary["best_step"]).items():
        assert torch.equal(drafter.state_dict()[name], tensor)
    page = (run_dir / "drafter" / "README.md").read_text()
    assert page.count("EAGLE") == 0 and "# FlexDraft drafter for" in page and "No engine reads" in page


def test_rows_without_an_anchor_are_refused() -> None:
    alone = make_rows([([5, 6, 7, 8], [0, 0, 0, 1])] * 3, [{}] * 3)
    with pytest.raises(UserError, match="none of the 3 training rows has an anchor"):
        flexdraft.refuse_short(alone)
    flexdraft.refuse_short(make_rows([([5, 6, 7], [0, 1, 1])], [{}]))


def test_a_changed_recipe_is_refused(arguments: list[str], run_dir: Path) -> None:
    with pytest.raises(UserError, match=r"flex\.anchors: was 3, now 5"):
        flexdraft.main(recipe(arguments, run_dir, "flex.anchors=5"))


def test_the_calibrator_alone_is_fitted_and_belongs_to_its_masks(
    run_dir: Path, calibrated: Path, target: Target
) -> None:
    before, after = (load_flexdraft(folder / "drafter", target) for folder in (run_dir, calibrated))
    assert before.calibrator is None and after.calibrator is not None
    assert all(torch.equal(after.state_dict()[name], tensor) for name, tensor in before.state_dict().items())
    assert after.calibrator.outer.weight.abs().max() > 0
    folder = calibrated / "drafter"
    papers = read_json(folder / "provenance.json", "x")
    model = folder / "model.safetensors"
    own = model.read_bytes()
    try:
        model.write_bytes(own[:-1] + bytes([own[-1] ^ 1]))
        with pytest.raises(UserError, match=r"calibrator\.safetensors was fitted for another drafter"):
            check_flexdraft(folder, target)
        model.write_bytes(own)
        write_json(folder / "provenance.json", papers | {"fingerprint": "other"})
        with pytest.raises(UserError, match=r"calibrator\.safetensors was fitted for another target"):
            check_flexdraft(folder, None)
    finally:
        model.write_bytes(own)
        write_json(folder / "provenance.json", papers)


def test_a_calibrator_beside_the_masks_is_replaced_aloud(
    arguments: list[str], run_dir: Path, calibrated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for start, count in ((run_dir, 0), (calibrated, 1)):
        calibrator.main(recipe(arguments, tmp_path / "again", f"flexdraft={start}", "dry_run=true"))
        assert capsys.readouterr().out.count("have a calibrator (rank 8). A new one takes its place") == count


def test_a_dry_run_names_the_decoders_that_the_drafter_has(
    arguments: list[str], run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["eval.decoders=[ar,chain,eagle,graft]", "dry_run=true"]
    flexdraft.main(recipe(arguments, tmp_path / "new", *asked))
    calibrator.main(recipe(arguments, tmp_path / "new", f"flexdraft={run_dir}", *asked))
    assert capsys.readouterr().out.count("prompts by ar, chain, flex, graft\n") == 2
    eagle.main(recipe(arguments, tmp_path / "new", *asked))
    assert "prompts by ar, chain, eagle, graft\n" in capsys.readouterr().out
    evaluation.main(recipe(arguments, run_dir, *asked))
    assert "flex: sequential, at most 3 drafts in a row" in capsys.readouterr().out
    with pytest.raises(UserError, match="decoder=talon is not for this drafter"):
        evaluation.main(recipe(arguments, run_dir, *asked, "decoder=talon"))


@pytest.mark.parametrize("family", [flexdraft, eagle])
def test_masks_to_go_on_from_are_refused_where_they_would_not_be_read(
    arguments: list[str], run_dir: Path, tmp_path: Path, family: ModuleType
) -> None:
    with pytest.raises(UserError, match=r"is for train/calibrator\.py.*leave flexdraft out"):
        family.main(recipe(arguments, tmp_path / "new", f"flexdraft={run_dir}"))
    with pytest.raises(UserError, match=r"trains a new drafter.*leave drafter out"):
        family.main(recipe(arguments, tmp_path / "new", f"drafter={run_dir}/drafter"))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("dry", ["true", "false"])
def test_gates_of_masks_are_not_calibrated(arguments: list[str], run_dir: Path, tmp_path: Path, dry: str) -> None:
    """Which is said before anything loads."""
    with pytest.raises(UserError, match="a FlexDraft drafter has nothing for it to choose"):
        calibrate.main(recipe(arguments, run_dir, f"dry_run={dry}"))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "flexdraft=RUN_DIR is missing"),
        (["flexdraft=nowhere"], "no FlexDraft drafter there"),
        (["flexdraft={run}", "flex.block_size=8"], "trained in blocks of 4: give flex.block_size=4"),
        (["flexdraft={run}", "run_dir={run}"], "is the run that is gone on from"),
    ],
)
def test_a_calibrator_of_nothing_or_of_other_masks_is_refused(
    arguments: list[str], run_dir: Path, tmp_path: Path, given: list[str], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        calibrator.main(recipe(arguments, tmp_path / "none", *(text.format(run=run_dir) for text in given)))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["flex.layers=9"], "flex.layers=9 is out of range: this target has 8 layers"),
        (["flex.block_size=1"], "from 2"),
        (["flex.parametrisation=lora", "flex.lora_rank=32"], "flex.lora_rank=32 is no low rank: .* hidden size is 32"),
    ],
)
def test_what_the_target_cannot_be_is_refused_before_weights_load(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], words: str
) -> None:
    monkeypatch.setattr("train.run.load_target", None)
    with pytest.raises(UserError, match=words):
        flexdraft.main(recipe(arguments, tmp_path / "none", *given))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ddp", "zero2", "zero3"])
def test_two_processes_learn_what_one_does(
    arguments: list[str], run_dir: Path, calibrated: Path, tmp_path: Path, backend: str
) -> None:
    """Under ZeRO-3 every parameter is partitioned; the target, and masks that are not trained, are whole on each."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}
    environment |= {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    launcher = ["-m", "accelerate.commands.launch", "--config_file", f"{ROOT}/recipes/accelerate/{backend}.yaml"]
    for program, alone, more in (
        ("flexdraft", run_dir, []),
        ("calibrator", calibrated, [f"flexdraft={run_dir}"]),
    ):
        file = [f"{ROOT}/train/{program}.py"]
        if backend == "zero3":
            file = [f"{ROOT}/tests/train/partitioned.py", program]
        line = [sys.executable, *launcher, *file, *arguments, *more, f"run_dir={program}"]
        done = subprocess.run(line, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=600)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
        assert curve(tmp_path / program, "loss") == pytest.approx(curve(alone, "loss"), abs=1e-4)
        assert curve(tmp_path / program, "validation_tau") == pytest.approx(curve(alone, "validation_tau"), abs=1e-4)


def test_low_rank_masks_are_trained_exported_and_calibrated(
    arguments: list[str], target: Target, tmp_path: Path
) -> None:
    low = ["flex.parametrisation=lora", "flex.lora_rank=2", "train.max_steps=2", "eval.decoders=[ar,flex]"]
    flexdraft.main(recipe(arguments, tmp_path / "low", *low))
    calibrator.main(recipe(arguments, tmp_path / "both", *low, f"flexdraft={tmp_path / 'low'}"))
    masks, both = (load_flexdraft(tmp_path / name / "drafter", target, adapters=True) for name in ("low", "both"))
    assert masks.config.lora_rank == both.config.lora_rank == 2 and both.calibrator is not None
    learned, best = masks.state_dict(), read_json(tmp_path / "low" / "summary.json", "x")["best_step"]
    kept = Store(tmp_path / "low").model(best)
    assert not any("base_layer" in name for name in kept) and any("lora_B" in name for name in kept)
    assert all(torch.equal(both.state_dict()[name], tensor) for name, tensor in learned.items())
    assert all(bool(t.abs().max() > 0) for name, t in learned.items() if "lora_B" in name)
    count = sum(p.numel() for p in masks.parameters() if p.requires_grad)
    assert f"drafter: {count:,} trained parameters" in flexdraft_cost(recipe(arguments, tmp_path, *low), 10)


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_an_interrupted_run_ends_where_the_whole_one_does(target: Target, tmp_path: Path, lora_rank: int) -> None:
    ended = []
    for name, stops in (("whole", [0]), ("parts", [3, 0])):
        (tmp_path / name).mkdir()
        for stop in stops:
            accelerator = make_accelerator(torch.device("cpu"), 0.5)
            learner = objective(target, lora_rank=lora_rank)
            parts = (tiny_run.recipe(save_every=3), learner, tiny_run.rows(), accelerator, tmp_path / name)
            loop = tiny_run.StoppingLoop(*parts)
            loop.stop_after = stop
            try:
                loop.run(tiny_run.IDENTITY, None, {})
            except tiny_run.Stop:
                continue
        ended.append(loop.objective.drafter.state_dict())
    assert all(torch.equal(tensor, ended[1][name]) for name, tensor in ended[0].items())


def test_parameters_are_counted_right(arguments: list[str], target: Target, tmp_path: Path) -> None:
    given = recipe(arguments, tmp_path)
    count = sum(p.numel() for p in objective(target).drafter.parameters())
    assert f"drafter: {count:,} trained parameters" in flexdraft_cost(given, 10)
    layers = FlexDraft(FlexDraftConfig.from_target(target, 3, 4, whole=True))
    count_layers = sum(p.numel() for p in layers.parameters())
    given_layers = recipe(arguments, tmp_path, "flex.parametrisation=layers")
    assert f"drafter: {count_layers:,} trained parameters" in flexdraft_cost(given_layers, 10)
    whole = sum(p.numel() for p in objective(target, calibrator=8).drafter.parameters())
    assert f"drafter: {whole - count:,} trained parameters" in calibrator_cost(given, 10)
