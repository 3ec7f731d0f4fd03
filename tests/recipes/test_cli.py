"""How entry points and scripts show a mistake."""

import errno
from collections.abc import Callable
from typing import NoReturn

import pytest
from safetensors import SafetensorError

from recipes.cli import told

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
