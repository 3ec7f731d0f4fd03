import json
import math
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from models.target import Target
from recipes.schema import TrainConfig, UserError
from tests.train import tiny_run
from tests.train.reading import curve
from train.backend import make_accelerator, make_optimizer
from train.loop import learning_rate


def test_schedule_warms_up_then_falls_to_its_floor() -> None:
    cfg = TrainConfig(learning_rate=2.0, warmup=0.1, min_lr=0.25)
    rates = [learning_rate(step, 100, cfg) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * (k + 1) for k in range(10)])
    assert max(rates) == rates[10] == 2.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.5)
    half = 10 + 89 / 2
    assert rates[int(half)] == pytest.approx(0.5 + 1.5 * 0.5 * (1 + math.cos(math.pi * (int(half) - 10) / 89)))
    assert learning_rate(0, 1, cfg) == 2.0


def test_gains_are_not_decayed(target: Target) -> None:
    objective = tiny_run.objective(target)
    optimizer = make_optimizer(objective, TrainConfig(weight_decay=0.1))
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
    assert all(p.dim() == 1 for p in optimizer.param_groups[1]["params"])
    assert len(make_optimizer(objective, TrainConfig()).param_groups) == 1


def test_the_target_is_no_part_of_what_trains(target: Target) -> None:
    objective = tiny_run.objective(target)
    assert sum(p.numel() for p in objective.parameters()) == sum(p.numel() for p in objective.drafter.parameters())


def test_accumulation_equals_one_micro_batch(target: Target, tmp_path: Path) -> None:
    """The same optimiser step as four micro-batches of one row and as one of four: loss, norm and update."""
    results = []
    for micro_batch_tokens in (20, 200):
        accelerator = make_accelerator(torch.device("cpu"), 0.5)
        recipe = tiny_run.recipe(batch_tokens=80, micro_batch_tokens=micro_batch_tokens)
        loop = tiny_run.Loop(recipe, tiny_run.objective(target), tiny_run.rows([20, 18, 19, 17]), accelerator, tmp_path)
        loop.start({})
        (step,) = loop.schedule.epoch(0)
        assert len(step) == 80 // micro_batch_tokens or len(step) == 1
        norm = float(loop._step(step))
        assert loop.latest is not None
        results.append((float(loop.latest.loss), norm, loop.objective.drafter.state_dict()))
    (loss_a, norm_a, after_a), (loss_b, norm_b, after_b) = results
    assert loss_a == pytest.approx(loss_b, abs=1e-6)
    assert norm_a == pytest.approx(norm_b, rel=1e-5)
    for name, tensor in after_a.items():
        # AdamW's first update is lr x sign(gradient) almost everywhere: nearly-zero gradients may differ in more
        assert float((tensor - after_b[name]).abs().mean()) < 1e-6, name


def test_a_tiny_run_learns_its_rows_by_heart(target: Target, tmp_path: Path) -> None:
    """Rows that the target wrote greedily: the loss falls, and simulated tau rises well above 1."""
    ids = torch.randint(0, tiny_run.VOCAB, (4, 4), generator=torch.Generator().manual_seed(0))
    for _ in range(16):
        ids = torch.cat([ids, target.logits(target.features(ids).final_BTH[:, -1:]).argmax(-1)], dim=1)
    data = tiny_run.make_rows([(row.tolist(), [0] * 4 + [1] * 16) for row in ids], [{}] * 4)
    kept = tiny_run.VocabMap.identity(tiny_run.VOCAB)
    accelerator = make_accelerator(torch.device("cpu"), 0.5)
    recipe = tiny_run.recipe(epochs=60, batch_tokens=80, micro_batch_tokens=80, learning_rate=2e-2)
    (tmp_path / "run").mkdir()
    loop = tiny_run.Loop(recipe, tiny_run.objective(target, kept), data, accelerator, tmp_path / "run")
    loop.run(tiny_run.IDENTITY, None, {})
    losses, taus = curve(tmp_path / "run", "loss"), curve(tmp_path / "run", "simulated_tau")
    assert losses[-1] < losses[0] - 0.7, "what is left is the entropy of the teacher"
    assert taus[-1] > taus[0] + 0.7


def test_a_loss_that_is_not_a_number_stops_the_run_and_saves_nothing(target: Target, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"(?s)(loss|gradient) of step \d+ is not a number.*learning_rate"):
        tiny_run.run(target, tmp_path / "run", learning_rate=1e30, warmup=0.0)
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))


def test_what_stopped_a_run_is_kept_and_shown_by_the_line_that_the_message_gives(
    target: Target, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="loss of step 3 is not a number") as stop:
        tiny_run.run(target, tmp_path / "run", spoil={3: math.nan}, save_every=2)
    assert "step-2 is the newest good checkpoint" in str(stop.value) and "spike" not in str(stop.value)
    line = next(line for line in str(stop.value).splitlines() if line.lstrip().startswith("python -c"))
    words = [sys.executable, *shlex.split(line)[1:]]
    shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    kept = json.loads((tmp_path / "run" / "stopped" / "step-3" / "step.json").read_text())
    loop = tiny_run.StoppingLoop(
        tiny_run.recipe(), tiny_run.objective(target), tiny_run.rows(), tiny_run.accelerator(), tmp_path
    )
    rows = sorted(row for pack in loop.schedule.epoch(0)[2] for row in pack)
    assert kept["step"] == 3 and kept["loss"] == "nan" and kept["grad_norm"] > 0 and kept["epoch"] == 0
    assert sorted(row for micro in kept["micro_batches"] for row in micro["rows"]) == rows
    first = kept["micro_batches"][0]
    assert f"{first['name']}/ids" in shown and f"{first['name']}/answer" in shown
    tensors = load_file(tmp_path / "run" / "stopped" / "step-3" / "batch.safetensors")
    ids = torch.cat([tiny_run.rows().row(row)[0] for row in first["rows"]])
    assert torch.equal(tensors[f"{first['name']}/ids"], ids.to(tensors[f"{first['name']}/ids"].dtype))


def test_a_spike_stops_the_run_unless_it_is_told_to_go_on(target: Target, tmp_path: Path) -> None:
    steps: dict[str, Any] = {"max_steps": 60, "epochs": 1, "save_every": 40, "log_every": 20, "warmup": 0.02}
    with pytest.raises(UserError, match=r"loss of step 55 is [\d.]+, 3\.9 times the median of the 50 before") as stop:
        tiny_run.run(target, tmp_path / "run", spoil={30: 4.0, 55: 4.0}, **steps)
    assert "train.spike=0" in str(stop.value)
    assert (tmp_path / "run" / "stopped" / "step-55" / "batch.safetensors").is_file()
    with pytest.raises(UserError, match="loss of step 55 is"):
        tiny_run.run(target, tmp_path / "run", spoil={55: 4.0}, **steps)
    loop = tiny_run.run(target, tmp_path / "run", spoil={55: 4.0}, spike=0.0, **steps)
    assert loop.state.cursor.step == 60


def test_best_follows_measured_tau_and_every_epoch_is_scored(target: Target, tmp_path: Path) -> None:
    scores = iter([1.5, 2.5, 2.0])
    accelerator = make_accelerator(torch.device("cpu"), 0.5)
    recipe = tiny_run.recipe(epochs=3, keep=1)
    loop = tiny_run.Loop(recipe, tiny_run.objective(target), tiny_run.rows(), accelerator, tmp_path)
    state = loop.run(tiny_run.IDENTITY, lambda step: next(scores), {})
    steps = sorted(state.scores)
    assert len(steps) == 3 and [state.scores[s] for s in steps] == [1.5, 2.5, 2.0]
    assert loop.store.named("best") == steps[1]
    assert loop.store.named("latest") == steps[2]
    assert loop.store.steps() == steps[1:], "keep one besides best"
    shutil.rmtree(loop.store.path(steps[1]))  # damaged: the message says to delete it
    tiny_run.run(target, tmp_path, epochs=3, keep=1)
    assert loop.store.named("best") == steps[2]


def test_processes_that_do_not_see_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.backend.Accelerator", lambda **_: type("Alone", (), {"num_processes": 1})())
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="they would train apart"):
        make_accelerator(torch.device("cpu"), 0.5)
