"""Exact resume, refusals, and what a kill leaves."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.target import Target
from models.vocab import VocabMap, read_vocab, write_vocab
from recipes.schema import DataConfig, Recipe, SourceConfig, TrainConfig, UserError
from tests.train import tiny_run
from tests.train.reading import curve
from train.batches import Cursor
from train.checkpoint import State, Store, run_identity

TWENTY: dict[str, Any] = {"max_steps": 20, "save_every": 5, "epochs": 1}


def weights(run_dir: Path, step: int) -> dict[str, Tensor]:
    return Store(run_dir).model(step)


def small_checkpoint(step: int, value: float = 0.0) -> tuple[State, dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    tensors = {"w": torch.full((3,), value)}
    moments = {kind: {"w": torch.full((3,), value)} for kind in ("exp_avg", "exp_avg_sq")}
    return State(Cursor(step)), tensors, moments


def test_twenty_steps_equal_ten_then_resume_then_ten_bit_for_bit(target: Target, tmp_path: Path) -> None:
    tiny_run.run(target, tmp_path / "whole", **TWENTY)
    tiny_run.run(target, tmp_path / "parts", stop_after=10, **TWENTY)
    assert Store(tmp_path / "parts").latest() == 10
    tiny_run.run(target, tmp_path / "parts", **TWENTY)
    whole, parts = weights(tmp_path / "whole", 20), weights(tmp_path / "parts", 20)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    moments = [Store(tmp_path / name).moments(20) for name in ("whole", "parts")]
    for kind in ("exp_avg", "exp_avg_sq"):
        assert all(torch.equal(moments[0][kind][n], moments[1][kind][n]) for n in moments[0][kind])
    assert curve(tmp_path / "whole", "loss") == curve(tmp_path / "parts", "loss")
    assert curve(tmp_path / "parts", "step") == list(range(1, 21))


def test_a_kill_after_step_thirteen_repeats_from_ten(target: Target, tmp_path: Path) -> None:
    """metrics.jsonl may be ahead of the checkpoint: the lines after it go."""
    tiny_run.run(target, tmp_path / "whole", **TWENTY)
    tiny_run.run(target, tmp_path / "parts", stop_after=10, **TWENTY)
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "loss": 0}\n{"step": 12, "lo')
    tiny_run.run(target, tmp_path / "parts", **TWENTY)
    assert curve(tmp_path / "whole", "loss") == curve(tmp_path / "parts", "loss")


def test_a_finished_run_trains_no_further(target: Target, tmp_path: Path) -> None:
    tiny_run.run(target, tmp_path, max_steps=3)
    before = weights(tmp_path, 3)
    tiny_run.run(target, tmp_path, max_steps=3)
    assert Store(tmp_path).steps() == [3]
    assert all(torch.equal(t, before[n]) for n, t in weights(tmp_path, 3).items())


def test_a_half_written_save_leaves_a_run_that_resumes(target: Target, tmp_path: Path) -> None:
    tiny_run.run(target, tmp_path, stop_after=5, **TWENTY)
    half = tmp_path / "checkpoints" / ".step-10.4242"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"\x10\x00")
    bare = tmp_path / "checkpoints" / "step-7"  # as a deletion cut short leaves it
    bare.mkdir()
    tiny_run.run(target, tmp_path, **TWENTY)
    assert Store(tmp_path).latest() == 20
    assert not half.exists()


def test_a_kill_between_save_and_score_is_made_good(target: Target, tmp_path: Path) -> None:
    loop = tiny_run.run(target, tmp_path, epochs=1)
    last = loop.state.cursor.step
    assert Store(tmp_path).state(last).scores == {}
    again = tiny_run.Loop(
        tiny_run.recipe(epochs=1), tiny_run.objective(target), tiny_run.rows(), loop.accelerator, tmp_path
    )
    state = again.run(tiny_run.IDENTITY, lambda step: 1.25, {})
    assert state.scores == {last: 1.25}
    assert Store(tmp_path).state(last).scores == {last: 1.25}


def test_a_kill_between_a_score_and_its_pointer_is_made_good(target: Target, tmp_path: Path) -> None:
    """The newest checkpoint has its score; `best` would go on to name an older one, or none at all."""
    for pointer in ("step-1", ""):
        loop = tiny_run.run(target, tmp_path / f"run-{pointer}", epochs=1)
        last = loop.state.cursor.step
        loop.state.scores = {last: 1.25}
        loop.store.record(loop.state)
        (loop.store.folder / "best").write_text(pointer)
        tiny_run.run(target, tmp_path / f"run-{pointer}", epochs=1)
        assert loop.store.named("best") == last


def test_order_is_numeric_and_best_is_kept(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for step in (8, 9, 10, 11, 100):
        state, model, moments = small_checkpoint(step, float(step))
        state.scores = {8: 3.0}
        store.save(state, model, moments, keep=2)
    assert store.steps() == [8, 11, 100]
    assert store.latest() == store.named("latest") == 100
    assert store.model(11)["w"].tolist() == [11.0] * 3


def test_a_pointer_to_nothing_is_no_checkpoint(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(*small_checkpoint(4), keep=2)
    store.point("best", 9)
    assert store.named("best") is None and store.named("latest") == 4


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(*small_checkpoint(4, 1.0), keep=2)
    store.save(*small_checkpoint(4, 2.0), keep=2)
    assert store.model(4)["w"].tolist() == [2.0] * 3


def test_the_best_score_wins_and_the_earlier_of_equals() -> None:
    assert State(scores={30: 2.0, 10: 2.5, 20: 2.5}).best() == 10
    assert State().best() is None


def test_a_changed_run_is_refused_with_every_difference(target: Target, tmp_path: Path) -> None:
    tiny_run.run(target, tmp_path, max_steps=2)
    with pytest.raises(UserError) as refusal:
        Store(tmp_path).resume({"train.epochs": "3", "data.hash": "abc", "target.fingerprint": "f"})
    text = str(refusal.value)
    assert "train.epochs: was 2, now 3" in text
    assert "target.fingerprint: was (absent), now f" in text
    assert "data.hash" not in text and "run_dir=DIR" in text


def test_a_checkpoint_of_another_vocabulary_is_refused(target: Target, tmp_path: Path) -> None:
    """Even where the papers say that all is the same."""
    tiny_run.run(target, tmp_path, max_steps=3)
    file = Store(tmp_path).path(3) / "vocab.safetensors"
    assert read_vocab(file).hash() == tiny_run.vocab().hash()
    write_vocab(VocabMap.from_ids([t for t in range(tiny_run.VOCAB) if t % 5 != 1], tiny_run.VOCAB), file)
    with pytest.raises(UserError, match=r"another vocabulary map \(256 of 320 tokens.*run_dir=DIR"):
        tiny_run.run(target, tmp_path, max_steps=3)
    file.unlink()
    with pytest.raises(UserError, match="no vocabulary map can be read"):
        tiny_run.run(target, tmp_path, max_steps=3)


def test_identity_holds_what_is_learned_and_not_how_it_is_run() -> None:
    sources = {"chat": SourceConfig(rows=5)}
    base = run_identity(Recipe(data=DataConfig(sources=sources)), "eagle", hash="h")
    assert base["data.sources.chat.rows"] == "5" and base["hash"] == "h"
    same = Recipe(data=DataConfig(sources=sources, cache="/elsewhere"), train=TrainConfig(save_every=7, log_every=1))
    assert run_identity(same, "eagle", hash="h") == base
    other = run_identity(Recipe(data=DataConfig(sources=sources), seed=1), "eagle", hash="h")
    assert {k for k in base if base[k] != other[k]} == {"seed"}


def test_state_is_json_and_tensors_are_named(target: Target, tmp_path: Path) -> None:
    loop = tiny_run.run(target, tmp_path, max_steps=2)
    store = Store(tmp_path)
    raw = json.loads((store.path(2) / "state.json").read_text())
    assert raw["cursor"]["step"] == 2 and raw["optimizer_step"] == 2 and raw["identity"] == tiny_run.IDENTITY
    names = {n for n, _ in loop.objective.drafter.named_parameters()}
    assert store.model(2).keys() == names
    assert all(t.dtype == torch.float32 for t in store.model(2).values())
    assert store.moments(2)["exp_avg"].keys() == store.moments(2)["exp_avg_sq"].keys() == names


@pytest.mark.parametrize("content", ["{}", '{"scores": [], "cursor": 1}', "[]", "{"])
def test_a_damaged_state_is_refused_with_what_to_do(tmp_path: Path, content: str) -> None:
    store = Store(tmp_path)
    store.save(*small_checkpoint(4), keep=2)
    (store.path(4) / "state.json").write_text(content)
    with pytest.raises(UserError, match=r"damaged checkpoint, delete its folder: .*step-4.state\.json"):
        store.resume({})
