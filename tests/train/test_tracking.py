import json
from pathlib import Path
from typing import Any

import pytest
import torch

from train.backend import make_accelerator
from train.tracking import Tracking, flatten, has_key, truncate


def tracking(folder: Path, kind: str = "none", step: int = 0) -> Tracking:
    return Tracking(folder, step, make_accelerator(torch.device("cpu"), 1.0), kind, {"seed": 0})


def test_lines_are_on_disk_at_once(tmp_path: Path) -> None:
    log = tracking(tmp_path)
    log.log(1, {"loss": 2.0, "acc": [0.5, 0.25]})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": 2.0, "acc": [0.5, 0.25]}
    log.close()


def test_resume_drops_what_came_after(tmp_path: Path) -> None:
    log = tracking(tmp_path)
    for step in (1, 2, 3):
        log.log(step, {"loss": step})
    log.close()
    log = tracking(tmp_path, step=2)
    log.log(3, {"loss": 30})
    log.close()
    assert [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2, 30]


def test_truncate_forgets_a_line_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    truncate(path, 5)
    assert path.read_text() == '{"step": 1}\n'


def test_lists_become_one_value_an_entry() -> None:
    assert flatten({"acc": [0.5, 0.25], "loss": 1}) == {"acc/0": 0.5, "acc/1": 0.25, "loss": 1}


def test_a_tracker_that_fails_only_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such project")

    monkeypatch.setattr("accelerate.Accelerator.init_trackers", broken)
    with pytest.warns(UserWarning, match="no such project"):
        log = tracking(tmp_path, "wandb")
    log.log(1, {"loss": 1.0})
    log.close()
    assert "loss" in (tmp_path / "metrics.jsonl").read_text()


def test_a_tracker_that_breaks_later_only_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ConnectionError("gone")

    monkeypatch.setattr("accelerate.Accelerator.init_trackers", lambda *_, **__: None)
    monkeypatch.setattr("accelerate.Accelerator.log", broken)
    log = tracking(tmp_path, "wandb")
    with pytest.warns(UserWarning, match="gone"):
        log.log(1, {"loss": 1.0})
    log.log(2, {"loss": 1.0})
    log.close()


def test_without_a_key_wandb_is_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert not has_key()
    monkeypatch.setattr("accelerate.Accelerator.init_trackers", lambda *_, **__: None)
    tracking(tmp_path, "wandb").file.close()
    import os

    assert os.environ.pop("WANDB_MODE") == "offline"


def test_a_key_is_found_in_the_environment_or_netrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert has_key()
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password k\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert has_key()


def test_offline_wandb_takes_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    log = tracking(tmp_path, "wandb")
    assert log.live
    log.log(1, {"loss": 1.0, "acc": [0.5]})
    log.close()
    assert list((tmp_path / "wandb").glob("offline-run-*"))
