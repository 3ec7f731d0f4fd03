"""One command from the real model to a measured drafter, in small: self-synthesised data, a few steps, a report."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
OVERALL = {
    "prompts",
    "tokens",
    "tau",
    "tau_ci95",
    "tau_without_bonus",
    "acceptance_by_position",
    "tokens_per_s",
    "baseline_tokens_per_s",
    "speedup",
    "speedup_ci95",
    "lossless",
    "ms_per_round",
    "loops",
}


def command(program: list[str], *more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    line = [sys.executable, *program, *more]
    return subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=480)


def train(run_dir: Path) -> subprocess.CompletedProcess[str]:
    return command(
        ["train/eagle.py"],
        "recipe=smollm2",
        f"run_dir={run_dir}",
        f"data.cache={run_dir.parent / 'cache'}",
        "data.sources.chat.rows=12",
        "data.sources.chat.max_tokens=32",
        "data.answer_tokens=24",
        "data.validation_rows=2",
        "data.drop_loops=false",
        "train.epochs=1",
        "train.batch_tokens=512",
        "train.micro_batch_tokens=512",
        "train.tracker=none",
        "target.dtype=float32",
        "data.dtype=float32",
        "eval.limit=2",
        "eval.max_new_tokens=16",
        "eval.tune=false",
        "eval.matrix=warm-1",
    )


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    run_dir = tmp_path_factory.mktemp("runs") / "mini"
    return run_dir, train(run_dir)


def test_one_command_ends_with_a_measured_drafter(first: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    run_dir, done = first
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    summary = json.loads((run_dir / "summary.json").read_text())
    folder = run_dir / "eval" / f"step-{summary['best_step']}"
    decoders = [json.loads(path.read_text()) for path in sorted(folder.glob("results-*.json"))]
    assert {r["decoder"] for r in decoders} >= {"ar", "chain", "eagle", "graft"}
    for result in [json.loads((folder / "results.json").read_text()), *decoders]:
        assert result["schema"] == 1 and result["decoder"] and result["settings"]["max_new_tokens"] == 16
        assert {"target", "drafter", "environment", "overall", "categories", "per_prompt"} <= result.keys()
        assert result["overall"].keys() >= OVERALL
        assert result["overall"]["prompts"] == 2 == len(result["per_prompt"])
        checked = result["overall"]["lossless"]
        assert checked["identical"] + checked["near_ties"] == checked["checked"]
    report = (folder / "report.md").read_text()
    assert "graft" in report and "tau" in report
    tensors = load_file(run_dir / "drafter" / "model.safetensors")
    config = json.loads((run_dir / "drafter" / "config.json").read_text())
    assert tensors["lm_head.weight"].shape[0] == config["draft_vocab_size"] == len(tensors["d2t"])
    assert json.loads((run_dir / "drafter" / "provenance.json").read_text())["fingerprint"]
    assert (run_dir / "metrics.jsonl").read_text().strip()


def test_the_same_command_again_says_that_it_is_finished(
    first: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    run_dir, _ = first
    weights = (run_dir / "drafter" / "model.safetensors").stat().st_mtime_ns
    again = train(run_dir)
    assert again.returncode == 0 and "finished" in again.stdout
    assert (run_dir / "drafter" / "model.safetensors").stat().st_mtime_ns == weights


def test_a_drafter_for_another_target_is_refused(
    first: tuple[Path, subprocess.CompletedProcess[str]], other_target: Path, tmp_path: Path
) -> None:
    run_dir, _ = first
    out = tmp_path / "out"
    line = ["recipe=smollm2", f"target.path={other_target}", f"drafter={run_dir / 'drafter'}"]
    refused = command(["-m", "eval.run"], *line, f"out={out}", "eval.limit=1")
    assert refused.returncode == 2, refused.stderr[-2000:]
    assert "another target" in refused.stderr and "Traceback" not in refused.stderr
    assert not out.exists()
