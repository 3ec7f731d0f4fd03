"""What a run that goes on keeps of its beginning, whatever the machine it goes on with would have chosen."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from recipes.schema import UserError
from tests.train.reading import curve
from tests.train.tiny_recipe import recipe, written
from tests.train.tiny_run import Stop
from train.checkpoint import RECORDED, STEP, TEACHER, Store
from train.eagle import main
from train.loop import Loop

MORE = ["train.precision=fast", "train.max_steps=6", "train.save_every=2"]


@pytest.fixture(scope="module")
def arguments(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    changes = """
data: {slots: 8, validation_rows: 4}
eagle: {draft_vocab: 200, unroll_steps: 3}
eval: {decoders: [ar], lossless: -1, each_epoch: false}
"""
    return written(tmp_path_factory.mktemp("files"), model_folder, 24, 2, changes)


def begin(
    arguments: list[str], run_dir: Path, monkeypatch: pytest.MonkeyPatch, faster: torch.dtype, upto: int = 2
) -> None:
    """The first steps, on a machine that is faster in a dtype."""

    class Killed(Loop):
        def _save(self) -> None:
            super()._save()
            if self.state.cursor.step == upto:
                raise Stop

    with monkeypatch.context() as there:
        there.setattr("data_prep.probe.generation_dtype", lambda setting, device: faster)
        there.setattr("train.run.Loop", Killed)
        with pytest.raises(Stop):
            main(recipe(arguments, run_dir, *MORE))


def go_on(arguments: list[str], run_dir: Path, monkeypatch: pytest.MonkeyPatch, faster: torch.dtype) -> None:
    monkeypatch.setattr("data_prep.probe.generation_dtype", lambda setting, device: faster)
    main(recipe(arguments, run_dir, *MORE))


def test_a_run_keeps_the_precision_that_it_began_with(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bf16, fp32 = torch.bfloat16, torch.float32
    go_on(arguments, tmp_path / "whole", monkeypatch, bf16)
    begin(arguments, tmp_path / "parts", monkeypatch, bf16)
    capsys.readouterr()
    go_on(arguments, tmp_path / "parts", monkeypatch, fp32)
    assert f"{STEP}: bfloat16, as the run began; a new one would take float32 here" in capsys.readouterr().out
    assert curve(tmp_path / "parts", "loss") == curve(tmp_path / "whole", "loss")
    papers = json.loads((tmp_path / "parts" / "provenance.json").read_text())
    assert papers["precision"] == {"step": "bfloat16", "teacher": "bfloat16"}
    go_on(arguments, tmp_path / "other", monkeypatch, fp32)
    assert curve(tmp_path / "other", "loss") != curve(tmp_path / "whole", "loss"), "the two can be told apart"


def test_a_run_from_before_that_was_recorded_goes_on_and_records_it(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(arguments, tmp_path / "run", monkeypatch, torch.float32)
    store = Store(tmp_path / "run")
    file = store.path(2) / "state.json"
    state = json.loads(file.read_text())
    state["identity"] = {k: v for k, v in state["identity"].items() if k not in RECORDED}
    file.write_text(json.dumps(state))
    go_on(arguments, tmp_path / "run", monkeypatch, torch.float32)
    assert store.latest() == 6 and store.identity().keys() >= RECORDED
    assert store.identity()[TEACHER] == "float32"


def test_rows_that_were_made_again_and_came_out_otherwise_are_refused(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache may have been emptied, and another device writes other answers to the same questions."""
    cache = f"data.cache={tmp_path / 'cache'}"
    begin([*arguments, cache], tmp_path / "run", monkeypatch, torch.float32)
    moved = [*arguments, f"data.cache={shutil.copytree(tmp_path / 'cache', tmp_path / 'moved')}"]
    begin(moved, tmp_path / "run", monkeypatch, torch.float32, upto=4)
    assert (tmp_path / "run" / "data").resolve().is_relative_to(tmp_path / "moved")
    (file,) = tmp_path.glob("cache/rows-*/train/rows.safetensors")
    tensors = load_file(file)
    tensors["ids"][5] += 1
    save_file(tensors, file)
    with pytest.raises(UserError, match=r"data\.rows: was \w+, now \w+\n"):
        go_on([*arguments, cache], tmp_path / "run", monkeypatch, torch.float32)
