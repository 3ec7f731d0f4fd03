"""Two CPU processes under the shipped accelerate files train the single-process curve, and go on from each other's
checkpoints."""

import json
import os
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from models.target import Target
from tests.tiny import tiny_model_folder
from tests.train import backends, tiny_run
from tests.train.reading import curve
from train.batches import Schedule, deal
from train.checkpoint import MOMENTS, Store

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted(path.name for path in (ROOT / "recipes" / "accelerate").glob("*.yaml"))
SHORT: dict[str, Any] = {"max_steps": 8, "save_every": 4, "epochs": 1}
# weight decay: two groups of parameters
TWENTY: dict[str, Any] = {"max_steps": 20, "save_every": 10, "epochs": 1, "weight_decay": 0.1, "clip": 0.05}


def launch(model: Path, plan: list[dict[str, Any]], folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """The plan of tests/train/backends.py, started by `accelerate launch` with the file of its first entry."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment = {k: v for k, v in environment.items() if not k.startswith("ACCELERATE_")}
    (folder / "plan.json").write_text(json.dumps(plan, default=str))
    first = f"{ROOT}/recipes/accelerate/{plan[0]['config']}"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", first, *more]
    command += [backends.__file__, str(model), str(folder / "plan.json")]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=600)


def well(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


def same_curves(run_dir: Path, single: Path) -> None:
    assert curve(run_dir, "step") == curve(single, "step")
    assert curve(run_dir, "loss") == pytest.approx(curve(single, "loss"), abs=1e-4)
    assert curve(run_dir, "grad_norm") == pytest.approx(curve(single, "grad_norm"), rel=1e-3)
    assert curve(run_dir, "simulated_tau") == pytest.approx(curve(single, "simulated_tau"), abs=1e-4)


def same_checkpoints(one: Path, other: Path, step: int) -> None:
    """Bit for bit, the optimiser's state included."""
    stores = [Store(one), Store(other)]
    models, moments = [s.model(step) for s in stores], [s.moments(step) for s in stores]
    assert models[0].keys() == models[1].keys()
    for name in models[0]:
        assert torch.equal(models[0][name], models[1][name]), name
    for kind in MOMENTS:
        assert all(torch.equal(moments[0][kind][n], moments[1][kind][n]) for n in moments[0][kind])


def test_ddp_and_zero3_with_a_sharded_target_and_a_resume_without(
    target: Target, model_folder: Path, tmp_path: Path
) -> None:
    tiny_run.run(target, tmp_path / "single", **SHORT)
    half = {"config": "zero3.yaml", "run_dir": tmp_path / "run", "train": SHORT, "shard": True}
    whole = {"config": "ddp.yaml", "run_dir": tmp_path / "ddp", "train": SHORT}
    spoilt = whole | {"run_dir": tmp_path / "spoilt", "spoil": [3]}
    plan = [half | {"stop_after": 4}, whole, whole | {"compare": True}, spoilt, half]
    well(launch(model_folder, plan, tmp_path))
    same_curves(tmp_path / "ddp", tmp_path / "single")
    same_curves(tmp_path / "run", tmp_path / "single")
    # one process met a loss that is no number: all stopped at that step, and the batches of both are kept
    assert "the loss of step 3 is not a number" in (tmp_path / "spoilt" / "refused").read_text()
    kept = json.loads((tmp_path / "spoilt" / "stopped" / "step-3" / "step.json").read_text())
    assert {micro["name"].split("/")[0] for micro in kept["micro_batches"]} == {"rank-0", "rank-1"}
    shutil.rmtree(Store(tmp_path / "run").path(8))
    tiny_run.run(target, tmp_path / "run", **SHORT)
    same_curves(tmp_path / "run", tmp_path / "single")


@pytest.mark.slow
def test_every_backend_trains_the_same_and_resumes_to_the_bit(
    target: Target, model_folder: Path, tmp_path: Path
) -> None:
    """20 steps against the single process within 1e-4; 10 + resume + 10 against 20 bit for bit; another run refused."""
    tiny_run.run(target, tmp_path / "single", **TWENTY)
    other = {**tiny_run.IDENTITY, "train.epochs": "3", "target.fingerprint": "f"}
    plan: list[dict[str, Any]] = []
    for config in CONFIGS:
        entry = {"config": config, "train": TWENTY, "run_dir": tmp_path / config}
        parts = entry | {"run_dir": tmp_path / f"parts-{config}"}
        plan += [entry, parts | {"stop_after": 10}, parts | {"identity": other}, parts]
    again = {
        "config": "zero3.yaml",
        "run_dir": tmp_path / "again",
        "train": TWENTY | {"recompute": True},
        "shard": True,
    }
    well(launch(model_folder, [*plan, again], tmp_path))
    same_curves(tmp_path / "again", tmp_path / "single")
    for config in CONFIGS:
        same_curves(tmp_path / config, tmp_path / "single")
        same_checkpoints(tmp_path / config, tmp_path / f"parts-{config}", 20)
        assert curve(tmp_path / f"parts-{config}", "loss") == curve(tmp_path / config, "loss")
        refused = (tmp_path / f"parts-{config}" / "refused").read_text()
        assert "train.epochs: was 2, now 3" in refused and "target.fingerprint: was (absent), now f" in refused


@pytest.mark.slow
def test_a_run_goes_on_under_another_backend_and_another_number_of_processes(
    target: Target, model_folder: Path, tmp_path: Path
) -> None:
    """Sums are then added in another order: the curve agrees within 1e-4, not to the bit."""
    tiny_run.run(target, tmp_path / "single", **TWENTY)
    tiny_run.run(target, tmp_path / "begun", stop_after=10, **TWENTY)
    plan = []
    for config in CONFIGS:
        shutil.copytree(tmp_path / "begun", tmp_path / config)
        plan.append({"config": config, "run_dir": tmp_path / config, "train": TWENTY})
    for before, after in zip(CONFIGS, CONFIGS[1:] + CONFIGS[:1], strict=True):
        entry = {"run_dir": tmp_path / f"after-{before}", "train": TWENTY}
        plan += [entry | {"config": before, "stop_after": 10}, entry | {"config": after}]
    well(launch(model_folder, plan, tmp_path))
    for config in CONFIGS:
        same_curves(tmp_path / config, tmp_path / "single")
        same_curves(tmp_path / f"after-{config}", tmp_path / "single")
        shutil.rmtree(Store(tmp_path / f"after-{config}").path(20))
        tiny_run.run(target, tmp_path / f"after-{config}", **TWENTY)
        same_curves(tmp_path / f"after-{config}", tmp_path / "single")


@pytest.mark.slow
def test_a_sharded_target_of_any_family_says_what_the_whole_one_does(tmp_path: Path) -> None:
    families = ("qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text")
    folders = {family: tiny_model_folder(tmp_path / family, family) for family in families}
    plan = [{"config": "ddp.yaml", "run_dir": tmp_path, "model": str(f), "compare": True} for f in folders.values()]
    well(launch(folders["qwen3"], plan, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("config", ["ddp.yaml", "zero3.yaml"])
def test_two_machines(config: str, target: Target, model_folder: Path, tmp_path: Path) -> None:
    """The README's line for several machines, which are both this one."""
    tiny_run.run(target, tmp_path / "single", **SHORT)
    plan = [{"config": config, "run_dir": tmp_path / "run", "train": SHORT, "shard": True}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = [
        "--num_machines",
        "2",
        "--num_processes",
        "2",
        "--main_process_ip",
        "127.0.0.1",
        "--main_process_port",
        port,
    ]
    with ThreadPoolExecutor(2) as machines:
        both = [
            machines.submit(launch, model_folder, plan, tmp_path, *words, "--machine_rank", str(r)) for r in range(2)
        ]
    for one in both:
        well(one.result())
    same_curves(tmp_path / "run", tmp_path / "single")


@pytest.mark.slow
def test_kill_9_in_a_save_leaves_a_run_that_resumes(model_folder: Path, tmp_path: Path) -> None:
    plan: list[dict[str, Any]] = []
    for config in CONFIGS:
        entry = {"config": config, "run_dir": tmp_path / config, "train": SHORT}
        assert launch(model_folder, [entry | {"kill": True}], tmp_path).returncode != 0
        assert Store(tmp_path / config).steps() == [4] and list(tmp_path.glob(f"{config}/checkpoints/.step-*"))
        plan += [entry, entry | {"run_dir": tmp_path / f"whole-{config}"}]
    well(launch(model_folder, plan, tmp_path))
    for config in CONFIGS:
        same_checkpoints(tmp_path / config, tmp_path / f"whole-{config}", 8)
        assert not list(tmp_path.glob(f"{config}/checkpoints/.step-*"))


def test_one_step_leaves_a_rank_without_a_supervised_token() -> None:
    """Guards the other tests: their data must hold the case."""
    schedule = Schedule(tiny_run.rows().lengths, tiny_run.recipe(**SHORT).train, seed=0)
    shares = [deal(step, schedule.lengths, tiny_run.recipe().train.micro_batch_tokens, 2) for step in schedule.epoch(0)]
    assert any([] in share for both in shares for share in both)
