"""The scaling benchmark: a tiny shape on two CPU processes, and what is left when a training fails."""

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.schema import UserError
from scripts import bench_scale

SHORT = ["shapes=tiny", "steps=4", "warm=2", "every=1", "starts=2", "device=cpu", "backends=ddp"]


@pytest.mark.slow
def test_two_processes_are_measured_and_a_failed_launch_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_scale.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(bench_scale, "BACKENDS", ["ddp", "no-such-backend"])  # a configuration that fails
    out = tmp_path / "out.json"
    with pytest.raises(SystemExit, match="failed: tiny no-such-backend 2"):
        backends = "backends=ddp,no-such-backend"
        bench_scale.main([*SHORT, backends, "processes=2,64", f"work={tmp_path}", f"out={out}"])
    written = json.loads(out.read_text())
    (result,) = written["results"]  # 64 processes are more than there are
    assert (result["backend"], result["processes"]) == ("ddp", 2) and "CPU" in written["hardware"]
    steps = [line["step"] for line in result["lines"]]
    assert steps[:4] == [1, 2, 3, 4] and steps.count(1) == len(result["starts"]) == 2
    assert result["filled"] > 0.9, "a step is a full micro-batch of each process"
    assert result["tokens_per_s"] > 0 and 0 < result["target"] + result["drafter"] <= 1
    said = capsys.readouterr().out
    assert "no-such-backend 2: the training ended with code" in said and "its last lines:" in said
    assert not (tmp_path / "run" / "summary.json").exists()


def line(step: int, speed: float, target: float = 0.25) -> dict[str, Any]:
    shares = {"target_time": target, "drafter_time": 0.7, "data_time": 0.01}
    return {"step": step, "tokens_per_s": speed, "filled": 0.5, "peak_gib": step, "loss": 2.0, **shares}


def test_figures_are_medians_behind_the_warm_up() -> None:
    shape = bench_scale.SHAPES["tiny"]
    lines = [line(5, 1.0, 0.0), line(10, 1000.0, 0.2), line(15, 2000.0), line(20, 8000.0)]
    found = bench_scale.figures([bench_scale.Start(lines, 1.0)], shape, 2, warm=5)
    assert (found["tokens_per_s"], found["low_high"], found["peak_gib"]) == (2000.0, [1000.0, 8000.0], 20)
    # half of two micro-batches a step
    assert found["ms_a_step"] == 1e3 * 0.5 * 2 * shape.tokens / 2000
    assert found["other"] == pytest.approx(0.05)


def test_an_arm_is_the_median_of_all_its_starts() -> None:
    starts = [bench_scale.Start([line(1, 9.0), line(2, speed), line(3, speed + 2)], seconds)
              for speed, seconds in ((100.0, 40.0), (300.0, 20.0), (200.0, 30.0))]  # fmt: skip
    found = bench_scale.figures(starts, bench_scale.SHAPES["tiny"], 1, warm=1)
    assert (found["tokens_per_s"], found["starts"], found["start_s"]) == (201.0, [101.0, 301.0, 201.0], 30.0)


def test_ratios_are_to_one_process_of_the_backend_and_of_ddp(capsys: pytest.CaptureFixture[str]) -> None:
    arms = [("ddp", 1, 100.0), ("ddp", 2, 190.0), ("zero2", 1, 80.0), ("zero2", 2, 160.0)]
    results = [
        bench_scale.figures([bench_scale.Start([line(1, speed)], 1.0)], bench_scale.SHAPES["tiny"], count, 0)
        | {"shape": "tiny", "backend": backend, "processes": count}
        for backend, count, speed in arms
    ]
    bench_scale.show(results)
    assert [(r["of_one"], r["of_ddp_one"]) for r in results] == [(1, 1), (1.9, 1.9), (1, 0.8), (2, 1.6)]
    assert "1.9" in capsys.readouterr().out


def test_keys_are_checked() -> None:
    with pytest.raises(UserError, match="no such key: size"):
        bench_scale.main(["size=3"])
    with pytest.raises(UserError, match="at least warm"):
        bench_scale.main(["steps=10"])
    with pytest.raises(UserError, match="a step needs at least 64 tokens"):
        bench_scale.main(["tokens=7"])
    with pytest.raises(UserError, match="steps=²: must be a whole number"):
        bench_scale.main(["steps=²"])
    with pytest.raises(UserError, match="is a folder"):
        bench_scale.main([f"out={Path(__file__).parent}"])
    with pytest.raises(UserError, match="it is a file"):
        bench_scale.main(["device=cpu", f"work={__file__}"])
    with pytest.raises(UserError, match=r"backends=ddp,zero9: 'zero9' is none of ddp, zero1, zero2, .*zero3"):
        bench_scale.main(["backends=ddp,zero9"])
    with pytest.raises(UserError, match="device=gpu: 'gpu' is none of auto, cpu, cuda"):
        bench_scale.main(["device=gpu"])


def test_more_processes_than_cores_are_refused_or_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_scale.os, "cpu_count", lambda: 2)
    with pytest.raises(UserError, match=r"processes=64,4: there are 2 cores here"):
        bench_scale.main(["device=cpu", "processes=64,4"])
    with pytest.raises(UserError, match=r"processes=2,two: 'two' must be a whole number"):
        bench_scale.main(["device=cpu", "processes=2,two"])
    assert bench_scale.counts_of("1,2,4", bench_scale.torch.device("cpu")) == [1, 2]
    assert "processes=4 left out: there are 2 cores here" in capsys.readouterr().out
