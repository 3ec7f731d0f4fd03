from pathlib import Path

import pytest

from models.target import Target, load_target
from recipes.schema import TargetConfig
from tests.tiny import tiny_model_folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def target(model_folder: Path) -> Target:
    return load_target(TargetConfig(path=str(model_folder)))
