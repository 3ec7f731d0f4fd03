"""How entry points and scripts show a mistake."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from safetensors import SafetensorError

from recipes.cli import told

ROOT = Path(__file__).resolve().parents[2]
FULL = [
    OSError(errno.ENOSPC, "No space left on device", "rows.safetensors"),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
]


def stopped_by(error: Exception) -> Callable[[], NoReturn]:
    def run() -> NoReturn:
        raise error

    return run


@pytest.mark.parametrize("error", FULL, ids=lambda e: type(e).__name__)
def test_a_full_disk_is_told_in_a_line(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        told(stopped_by(error))
    assert stop.value.code == 2 and "the disk is full" in capsys.readouterr().err


def test_other_faults_are_not_dressed_up() -> None:
    with pytest.raises(FileNotFoundError):
        told(stopped_by(FileNotFoundError(errno.ENOENT, "no such file")))


@pytest.mark.parametrize("room", ["data_prep", "eval", "models", "train"])
def test_ctrl_c_while_modules_are_imported_is_a_line_and_130(room: str, tmp_path: Path) -> None:
    """And after that a script of anybody's own keeps its trace."""
    (tmp_path / "heavy.py").write_text(f"import {room}\nraise KeyboardInterrupt")

    def run(script: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
        return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)

    done = run("import heavy")
    assert (done.returncode, done.stderr) == (130, "interrupted before it began: nothing was done\n")
    assert "Traceback" in run(f"import {room}\nraise KeyboardInterrupt").stderr
