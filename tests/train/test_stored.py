"""Training from the target's states on disk is training on its features, rounded as the store rounds them."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from data_prep import states
from data_prep.rows import Rows, make_rows
from data_prep.state_store import Layout, StateStore, Stored
from data_prep.teacher import Features
from models.attention import Documents
from models.target import Target
from tests.train import tiny_run
from tests.train.reading import curve
from train.batches import Batch, Cursor, load_batch
from train.features import StoredTeacher, Teacher

UNTAUGHT = 50  # tokens of a row that no slot is supervised on, in a micro-batch of its own


class Rounded(Teacher):
    """What the target says now, rounded to bf16."""

    def features(self, batch: Batch, teaches_T: Tensor, documents: Documents) -> Features:
        found = super().features(batch, teaches_T, documents)
        return found._replace(
            taps_TC=found.taps_TC.bfloat16().to(found.taps_TC.dtype),
            final_mH=found.final_mH.bfloat16().to(found.final_mH.dtype),
        )


def data() -> Rows:
    """Those of the other tests, and one that teaches nothing."""
    rows = tiny_run.rows()
    answered = [(rows.row(i)[0].tolist(), rows.row(i)[1].tolist()) for i in range(len(rows))]
    return make_rows([*answered, ([7] * UNTAUGHT, [0] * UNTAUGHT)], [{}] * (len(rows) + 1))


DATA = data()


@pytest.fixture(scope="module")
def layout(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Layout:
    root = tmp_path_factory.mktemp("store")
    layout = Layout(root, DATA, target.fingerprint, target.hidden_size, target.taps, target.dtype, "bf16")
    states.write(layout, layout.missing(), lambda: target, 0, 1)
    return layout


def train(target: Target, run_dir: Path, teacher: Teacher, stop_after: int = 0) -> tiny_run.StoppingLoop:
    run_dir.mkdir(exist_ok=True)
    objective = tiny_run.objective(target)
    objective.teacher = teacher
    accelerator = tiny_run.make_accelerator(torch.device("cpu"), 0.5)
    recipe = tiny_run.recipe(max_steps=20, save_every=5)
    loop = tiny_run.StoppingLoop(recipe, objective, DATA, accelerator, run_dir)
    loop.stop_after = stop_after
    try:
        loop.run(tiny_run.IDENTITY, None, {})
    except tiny_run.Stop:
        assert stop_after
    return loop


def weights(loop: tiny_run.StoppingLoop) -> dict[str, Tensor]:
    return loop.objective.drafter.state_dict()


@pytest.fixture(scope="module")
def offline(target: Target, layout: Layout, tmp_path_factory: pytest.TempPathFactory) -> tiny_run.StoppingLoop:
    run_dir = tmp_path_factory.mktemp("offline") / "run"
    return train(target, run_dir, StoredTeacher(target, StateStore(layout)))


def test_training_from_disk_is_training_on_rounded_features_bit_for_bit(
    target: Target, offline: tiny_run.StoppingLoop, tmp_path: Path
) -> None:
    online = train(target, tmp_path / "run", Rounded(target, keep_bytes=2**30))
    for key in ("loss", "grad_norm", "simulated_tau"):
        assert curve(tmp_path / "run", key) == curve(offline.run_dir, key)
    assert len(curve(tmp_path / "run", "loss")) == 20
    for name, tensor in weights(online).items():
        assert torch.equal(tensor, weights(offline)[name]), name


def test_ten_steps_and_ten_after_a_resume_equal_twenty(
    target: Target, layout: Layout, offline: tiny_run.StoppingLoop, tmp_path: Path
) -> None:
    train(target, tmp_path / "run", StoredTeacher(target, StateStore(layout)), stop_after=10)
    resumed = train(target, tmp_path / "run", StoredTeacher(target, StateStore(layout)))
    assert curve(tmp_path / "run", "loss") == curve(offline.run_dir, "loss")
    for name, tensor in weights(resumed).items():
        assert torch.equal(tensor, weights(offline)[name]), name


def test_the_next_steps_rows_are_read_by_a_thread_and_only_once(
    target: Target, layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[tuple[str, tuple[int, ...]]] = []
    read = StateStore.read

    def noted(self: StateStore, pack: Sequence[int]) -> Stored:
        reads.append((threading.current_thread().name, tuple(pack)))
        return read(self, pack)

    monkeypatch.setattr(StateStore, "read", noted)
    loop = train(target, tmp_path / "run", StoredTeacher(target, StateStore(layout)))
    steps = [step for step, _ in loop.schedule.walk(Cursor())]
    assert sorted(pack for _, pack in reads) == sorted(tuple(pack) for step in steps for pack in step)
    assert all(thread.startswith("states") for thread, _ in reads)


def test_the_wait_for_the_disk_is_data_time_and_none_of_the_targets(
    target: Target, layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = StateStore.read

    def slow(self: StateStore, pack: Sequence[int]) -> Stored:
        time.sleep(0.2)  # what a step trains, and much more
        return read(self, pack)

    monkeypatch.setattr(StateStore, "read", slow)
    train(target, tmp_path / "run", StoredTeacher(target, StateStore(layout)))
    waited, taught = (curve(tmp_path / "run", f"{what}_time") for what in ("data", "target"))
    assert min(waited) > 0.5 and max(taught) < 0.1


def test_a_rank_without_rows_gets_features_of_the_right_shapes(target: Target, layout: Layout) -> None:
    objective = tiny_run.objective(target)
    expected = objective.prepare(load_batch(DATA, []))
    objective.teacher = StoredTeacher(target, StateStore(layout))
    found = objective.prepare(load_batch(DATA, []))
    for one, other in zip(found, expected, strict=True):
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            assert one.shape == other.shape and one.dtype == other.dtype
    loss, _ = objective(found, torch.zeros(tiny_run.STEPS))
    loss.backward()
    assert all(p.grad is not None and not p.grad.any() for p in objective.drafter.parameters())
