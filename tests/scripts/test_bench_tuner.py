"""The tuner beside a measured grid, on a tiny model and a CPU."""

from pathlib import Path

import pytest

from eval import tune
from scripts import bench_tuner
from tests.eval.fakes import fake_recipe
from tests.eval.world import World


def test_a_thin_grid_keeps_ar_and_reaches_from_end_to_end() -> None:
    whole = tune.candidates(fake_recipe(decoders=["chain", "eagle", "prune", "graft"]), "cuda")
    for count in (2, 9, 24, len(whole)):
        some = bench_tuner.thinned(whole, count)
        assert len(some) == count == len(set(some)) and some[0].decoder == "ar"
    assert {s.decoder for s in bench_tuner.thinned(whole, 24)} == {"ar", "chain", "eagle", "prune", "graft"}
    assert bench_tuner.thinned(whole, 0) == bench_tuner.thinned(whole, 999) == whole


def test_each_size_ends_in_the_choice_beside_the_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "ROUNDS", ((1, 8, 1), (1, 8, 1)))
    monkeypatch.setattr(tune, "GRID_BATCHES", 1)
    world = World(tmp_path)
    given = [a for a in world.arguments("eval.batch_sizes=[1,2]") if not a.startswith(("prompts", "out"))]
    bench_tuner.main([*given, "settings=4", "budget=0"])
    last = capsys.readouterr().out.splitlines()[-2:]
    assert [line.partition(":")[0] for line in last] == ["batch 1", "batch 2"]
    assert all("below the best of the grid" in line and "(4 settings, " in line for line in last)
    assert not (tmp_path / "drafter" / "tuned.json").exists()
