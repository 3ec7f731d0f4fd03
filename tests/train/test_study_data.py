"""A study trains on so many answer tokens, says so, and is known again when it is finished."""

import json
from pathlib import Path

import pytest

from recipes.schema import UserError
from scripts.study_data import Study, taus
from tests.train.tiny_recipe import recipe, written
from train import run

CHANGES = """
data: {slots: 8, validation_rows: 4}
eagle: {draft_vocab: 200, unroll_steps: 3}
train: {max_steps: 4}
eval: {decoders: [ar, chain], chain_length: 3, depth: 3, lossless: -1, each_epoch: false}
"""


def test_a_finished_study_is_its_own_and_no_other(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = recipe(written(tmp_path, model_folder, 24, 3, CHANGES), tmp_path / "run")
    run.main(asked, Study(60, []))
    said, found = taus(tmp_path / "run")
    assert 30 <= said["answer_tokens"] <= 90 and found["chain"] >= 1
    assert json.loads((tmp_path / "run" / "study.json").read_text()) == said
    capsys.readouterr()
    run.main(asked, Study(60, []))
    assert "this run is finished: 4 steps (its data: they are the same)" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"study\.answer_tokens"):
        run.main(asked, Study(61, []))


def test_rows_that_are_not_there_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"also: .*nowhere holds no prepared rows"):
        Study(0, [tmp_path / "nowhere"])
