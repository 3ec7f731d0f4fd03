"""What a training says of its own speed."""

import json
import time
from pathlib import Path

import pytest
import torch

from models.target import Target
from tests.train import tiny_run
from train.batches import Usage
from train.telemetry import Coming, Stopwatch, drafter_arithmetic, peak_arithmetic, target_arithmetic


def test_the_target_multiplies_every_token_by_every_matrix_and_the_teaching_ones_by_the_head(target: Target) -> None:
    inside = sum(p.numel() for name, p in target.model.named_parameters() if ".layers." in name and p.dim() == 2)
    head = target.head_weight.numel()
    assert target_arithmetic(target, tokens=50, teaching=7, pairs=0) == 2 * (50 * inside + 7 * head)
    pair = 2 * 2 * target.n_heads * target.head_dim  # scores, and values weighted by them
    assert target_arithmetic(target, 0, 0, pairs=9) == target.n_layers * 9 * pair


def test_the_drafter_does_so_thrice_for_every_supervised_slot(target: Target) -> None:
    """With every slot supervised the first step uses every matrix, the later ones all but fc and what multiplies
    embeddings, whose products the first step made."""
    drafter = tiny_run.objective(target).drafter
    matrices = {name: p.numel() for name, p in drafter.named_parameters() if p.dim() == 2}
    qkv = [matrices[f"midlayer.self_attn.{name}_proj.weight"] for name in "qkv"]
    every = sum(matrices.values())
    later = every - matrices["fc.weight"] - sum(qkv) // 2
    assert drafter_arithmetic(drafter.config, 20, [20], pairs=0) == 3 * 2 * 20 * every
    wide = 2 * drafter.config.num_attention_heads * drafter.config.head_dim
    diagonal = 15 * wide  # a slot of step 1 sees the one key that it made itself there
    assert drafter_arithmetic(drafter.config, 20, [20, 15], pairs=0) == 6 * (20 * every + 15 * later + diagonal)
    # half of the slots: half of the pairs, no MLP or head or state's query for the others, but keys, values and fc
    attention = sum(qkv[1:]) + qkv[0] // 2 + matrices["fc.weight"]
    half = drafter_arithmetic(drafter.config, 20, [10], pairs=210)
    assert half == 6 * (10 * every + 10 * attention + 105 * wide)


def test_pairs_are_counted_within_rows() -> None:
    usage = Usage()
    usage.add([[[0, 1]], [[2]]], torch.tensor([3, 4, 2]).numpy(), 100)
    assert usage.pairs == sum(sum(range(1, n + 1)) for n in (3, 4, 2))


def test_a_stopwatch_adds_up_by_name_and_starts_again() -> None:
    watch = Stopwatch(torch.device("cpu"))
    for name in ("target", "drafter", "drafter"):
        with watch.timed(name):
            time.sleep(0.01)
    first = watch.read()
    assert 0.009 < first["target"] < first["drafter"] < 1
    assert watch.read() == {}


@pytest.mark.parametrize("norm", [torch.tensor(0.25), 0.25])
def test_two_numbers_come_to_the_host_as_they_were(norm: torch.Tensor | float) -> None:
    """Some backends give the norm as a number already."""
    loss = torch.tensor(1.5, dtype=torch.float64)
    coming = Coming(loss, norm)
    loss.zero_()  # what is done with them afterwards does not show
    assert coming.read() == (1.5, 0.25)


def test_the_peak_is_of_the_card_and_absent_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA A100-SXM4-80GB": 312e12,
        "A card": None,
    }
    for name, peak in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert peak_arithmetic(torch.device("cuda")) == peak, name
    assert peak_arithmetic(torch.device("cpu")) is None


def test_every_line_says_where_the_time_went(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_run.run(target, tmp_path, max_steps=4, epochs=1, log_every=2)
    for line in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines()):
        shares = [line[f"{name}_time"] for name in ("data", "target", "drafter")]
        assert all(share >= 0 for share in shares) and 0.3 < sum(shares) <= 1
        assert line["drafter_tflops"] > 0 and line["target_tflops"] > 0 and line["peak_gib"] > 0.05
        assert 0 < line["supervised_per_s"] < line["tokens_per_s"] and "of_peak" not in line
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("supervised)", "target ", "drafter ", "data ", "padding ", " GiB"))
