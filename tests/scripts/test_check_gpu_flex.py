"""The checks that a GPU is asked for, on a CPU: each is made, and holds."""

import pytest

from recipes.schema import UserError
from scripts import check_gpu_flex


def test_every_check_is_made_and_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_gpu_flex.main(["device=cpu"], ("llama",)) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("llama, ")]
    assert len(lines) == 8 + len(check_gpu_flex.LEARNERS) and all(line.endswith(": equal") for line in lines)


def test_another_argument_is_refused() -> None:
    with pytest.raises(UserError, match="give device="):
        check_gpu_flex.main(["famly=llama"])
