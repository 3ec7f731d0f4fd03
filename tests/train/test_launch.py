"""Two CPU processes under the shipped accelerate files train the single-process curve."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from models.target import Target
from tests.train import tiny_run
from tests.train.reading import curve
from train.batches import Schedule, deal
from train.checkpoint import Store

ROOT = Path(__file__).resolve().parents[2]


def launch(config: str, model: Path, run_dir: Path, stop_after: int = 0) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment = {k: v for k, v in environment.items() if not k.startswith("ACCELERATE_")}
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        f"{ROOT}/recipes/accelerate/{config}",
    ]
    command += [tiny_run.__file__, str(model), str(run_dir), "2", str(stop_after)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=run_dir.parent, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


@pytest.fixture(scope="module")
def single(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("single") / "run"
    tiny_run.run(target, folder, save_every=4)
    return folder


def same_curves(run_dir: Path, single: Path) -> None:
    assert curve(run_dir, "step") == curve(single, "step")
    assert curve(run_dir, "loss") == pytest.approx(curve(single, "loss"), abs=1e-4)
    assert curve(run_dir, "grad_norm") == pytest.approx(curve(single, "grad_norm"), rel=1e-3)
    assert curve(run_dir, "simulated_tau") == pytest.approx(curve(single, "simulated_tau"), abs=1e-4)


def test_ddp(model_folder: Path, single: Path, tmp_path: Path) -> None:
    launch("ddp.yaml", model_folder, tmp_path / "run")
    same_curves(tmp_path / "run", single)


def test_zero2_and_a_resume_under_it_or_without_it(
    target: Target, model_folder: Path, single: Path, tmp_path: Path
) -> None:
    launch("zero2.yaml", model_folder, tmp_path / "run", stop_after=4)
    assert Store(tmp_path / "run").latest() == 4
    shutil.copytree(tmp_path / "run", tmp_path / "alone")
    launch("zero2.yaml", model_folder, tmp_path / "run")
    same_curves(tmp_path / "run", single)
    tiny_run.run(target, tmp_path / "alone", save_every=4)
    same_curves(tmp_path / "alone", single)


def test_one_step_leaves_a_rank_without_a_supervised_token() -> None:
    """Guards the other tests: their data must hold the case."""
    schedule = Schedule(tiny_run.rows().lengths, tiny_run.recipe().train, seed=0)
    shares = [deal(step, schedule.lengths, tiny_run.recipe().train.micro_batch_tokens, 2) for step in schedule.epoch(0)]
    assert any([] in share for both in shares for share in both)
