"""The scaling benchmark: a tiny shape on two CPU processes, and what is left when a training fails."""

import json
from pathlib import Path

import pytest

from scripts import bench_scale

SHORT = ["shapes=tiny", "steps=4", "warm=2", "every=1", "device=cpu", "backends=ddp"]


def test_two_processes_are_measured_and_a_failed_launch_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_scale.os, "cpu_count", lambda: 2)
    out = tmp_path / "out.json"
    with pytest.raises(SystemExit, match="failed: tiny no-such-backend 2"):
        backends = "backends=ddp,no-such-backend"
        bench_scale.main([*SHORT, backends, "processes=2,64", f"work={tmp_path}", f"out={out}"])
    written = json.loads(out.read_text())
    (result,) = written["results"]  # 64 processes are more than there are
    assert (result["backend"], result["processes"]) == ("ddp", 2) and "CPU" in written["hardware"]
    # a step is a full micro-batch of each process
    assert [line["step"] for line in result["lines"]][:4] == [1, 2, 3, 4]
    shape = bench_scale.SHAPES["tiny"]
    assert result["filled"] > 0.9
    assert result["ms_a_step"] * result["tokens_per_s"] == pytest.approx(1e3 * 2 * shape.tokens, rel=0.2)
    assert result["target"] + result["drafter"] + result["other"] == pytest.approx(1, abs=0.1)
    said = capsys.readouterr().out
    assert "no-such-backend 2: the training ended with code" in said and "its last lines:" in said
    assert not (tmp_path / "run" / "summary.json").exists()


def test_keys_are_checked() -> None:
    with pytest.raises(SystemExit, match="no such key: size"):
        bench_scale.main(["size=3"])
    with pytest.raises(SystemExit, match="at least warm"):
        bench_scale.main(["steps=10"])
