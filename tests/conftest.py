"""Two forms of the suite: the default one runs everything but the tests marked `slow`; `--slow` runs only those."""

import os

# Before torch is imported: two threads on a busy two-core machine are slower than one, and no test may reach a hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

import pytest


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
