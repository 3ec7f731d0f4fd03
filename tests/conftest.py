"""Two forms of the suite: the default one runs everything but the tests marked `slow`; `--slow` runs only those."""

import os
import signal
from collections.abc import Callable
from typing import Any

# Before torch is imported: two threads on a busy two-core machine are slower than one, and no test may reach a hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

import pytest

from tests.tiny import tiny_model_folder

# A shell that is not interactive starts what it puts behind `&` deaf to Ctrl-C, which some tests send
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow, and only those")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = bool(config.getoption("--slow"))
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        (kept if (item.get_closest_marker("slow") is not None) == slow else left).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """tiny_target(family, taps=None, **config changes) -> Target; one of each kind a session."""
    from models.target import load_target
    from recipes.schema import TargetConfig

    made: dict[str, Any] = {}

    def make(family: str = "llama", taps: list[int] | None = None, seed: int = 0, **changes: Any) -> Any:
        key = repr((family, taps, seed, sorted(changes.items())))
        if key not in made:
            folder = tiny_model_folder(tmp_path_factory.mktemp(family), family, seed, **changes)
            made[key] = load_target(TargetConfig(path=str(folder), taps=taps or []))
        return made[key]

    return make
