"""A tiny target, and a drafter that it accepts some drafts of; files that need others have fixtures of their own."""

from collections.abc import Callable
from typing import Any

import pytest

from models.eagle3 import Eagle3
from models.target import Target
from tests.tiny import tiny_drafter


@pytest.fixture(scope="module")
def target(tiny_target: Callable[..., Any]) -> Target:
    found: Target = tiny_target("llama", initializer_range=0.1)
    return found


@pytest.fixture(scope="module")
def drafter(target: Target) -> Eagle3:
    """Started from the target, so that some drafts are accepted."""
    found: Eagle3 = tiny_drafter(target, [i for i in range(320) if i % 5], noise=0.0)
    return found
