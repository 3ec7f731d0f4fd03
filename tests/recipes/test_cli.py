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


def interrupted(words: list[str], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """By a module that is imported in the place of torch, or as `heavy`."""
    for name in ("torch", "heavy"):
        (tmp_path / f"{name}.py").write_text("raise KeyboardInterrupt")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)


@pytest.mark.parametrize(
    "words", [["-m", "data_prep.states"], ["-m", "eval.chat"], [str(ROOT / "train/eagle.py")]], ids=lambda w: w[-1]
)
def test_ctrl_c_while_modules_are_imported_is_a_line_and_130(words: list[str], tmp_path: Path) -> None:
    done = interrupted(words, tmp_path)
    assert (done.returncode, done.stderr) == (130, "interrupted before it began: nothing was done\n")


@pytest.mark.parametrize("room", ["data_prep", "eval", "models", "train"])
def test_ctrl_c_in_anybody_elses_program_is_theirs(room: str, tmp_path: Path) -> None:
    """Their hook, set before or after, their exit code, and what they do at exit."""
    program = tmp_path / "app.py"
    said = "import atexit, sys, recipes\natexit.register(print, 'kept')\n"
    hook = "sys.excepthook = lambda *_: print('theirs', flush=True)\n"
    for begins in (f"{hook}import {room}\n", f"import {room}\n{hook}import train\n"):
        program.write_text(f"{said}{begins}import heavy\n")
        assert interrupted([str(program)], tmp_path).stdout == "theirs\nkept\n"
    program.write_text(f"import {room}, heavy")
    assert "Traceback" in interrupted([str(program)], tmp_path).stderr
