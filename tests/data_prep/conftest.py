"""A tiny target on disk, a recipe that prepares data with it, and a byte-level tokenizer to hang templates on."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipes.schema import DataConfig, EagleConfig, Recipe, SourceConfig, TargetConfig
from tests.tiny import tiny_model_folder, tiny_tokenizer


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("target"))


@pytest.fixture
def tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    path = tmp_path / "asked.jsonl"
    path.write_text("".join(json.dumps({"id": f"p{i}", "turns": [f"count to {i} for me"]}) + "\n" for i in range(12)))
    return path


@pytest.fixture
def make_recipe(tmp_path: Path, target_folder: Path, prompt_file: Path) -> Callable[..., Recipe]:
    """A recipe over the prompt file; keyword arguments replace keys of `data`."""

    def make(**changes: Any) -> Recipe:
        data = DataConfig(
            sources={"asked": SourceConfig(kind="file", path=str(prompt_file))},
            max_length=96,
            answer_tokens=24,
            temperatures=[1.0, 0.0],
            drop_loops=False,
            slots=5,
            dtype="float32",
            validation_rows=3,
            cache=str(tmp_path / "cache"),
        )
        target = TargetConfig(path=str(target_folder))
        return Recipe(recipe="tiny", device="cpu", target=target, data=replace(data, **changes), eagle=EagleConfig(64))

    return make
