"""Calibration: what it logs against real rounds, what it chooses against plain loops, and the way to a run's report."""

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.prompts import Prompt
from eval import calibrate, calibrated, run
from eval.calibrate import GRID, Log, choose, speed, watch
from eval.decode import STAGES, decode
from eval.matrix import SuccessorMatrix
from eval.outcome import row_id
from eval.settings import CALIBRATED, Settings
from recipes.cli import entry
from recipes.schema import EvalConfig, Recipe
from tests.eval.test_decode import LENGTHS
from tests.eval.test_run import World
from tests.tiny import tiny_drafter

FORCED = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (0.0, 0.0, 0.0))


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_what_is_logged_of_a_stage_is_what_its_round_emits(tiny_target: Callable[..., Any], heat: float) -> None:
    """The first round of a decoder whose gates stop there; and every round of one whose gates are open."""
    target = tiny_target("llama", initializer_range=0.1)
    drafter = tiny_drafter(target, noise=0.0)
    source = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, 320, (n,), generator=source).tolist() * 2 for n in LENGTHS]
    settings = Settings("graft", 40, temperature=heat)
    log = watch(target, drafter, settings, (prompts, [0, 1, 2]), SuccessorMatrix(320))
    for name in CALIBRATED:
        for stage, gates in enumerate(FORCED):
            forced = replace(settings, decoder=name, gates=gates)
            rows = decode(target, drafter, prompts, forced).rows
            assert log.tokens[name][0, :, stage].tolist() == [row.accepted_per_round[0] + 1 for row in rows]
            if stage == 3:
                for b, row in enumerate(rows):
                    for number in range(row.rounds):
                        if log.counts[number, b]:
                            assert int(log.tokens[name][number, b, 3]) == row.accepted_per_round[number] + 1
    assert log.counts[0].all() and log.tokens["graft"].max() > 1
    for gate, b in itertools.product(range(3), range(3)):  # confidences are what the gates compare
        for off, stopped in ((1e-4, 1), (-1e-4, 0)):
            shut = [0.0] * 3
            shut[gate] = float(log.confidence[0, b, gate]) * (1 + off)
            one = replace(settings, max_new_tokens=2, gates=tuple(shut))
            row = decode(target, drafter, [prompts[b]], one, row_ids=[b]).rows[0]
            assert row.stages[STAGES[gate]] == stopped


def random_log(seed: int, rounds: int = 40, rows: int = 2) -> Log:
    source = torch.Generator().manual_seed(seed)
    confidence = torch.rand(rounds, rows, 3, generator=source)
    tokens = {name: torch.randint(1, 6, (rounds, rows, 4), generator=source).sort(2).values for name in CALIBRATED}
    return Log(confidence, tokens, torch.rand(rounds, rows, generator=source) < 0.8)


def slow_speed(log: Log, decoder: str, costs: list[float], gates: list[float]) -> float:
    tokens = milliseconds = 0.0
    for number in range(len(log.counts)):
        last = -1
        for row in range(log.counts.shape[1]):
            if log.counts[number, row]:
                failed = [g for g, gate in enumerate(gates) if float(log.confidence[number, row, g]) <= gate]
                stage = failed[0] if failed else 3
                tokens += int(log.tokens[decoder][number, row, stage])
                last = max(last, stage)
        milliseconds += costs[last] if last >= 0 else 0.0
    return 1000 * tokens / milliseconds


@pytest.mark.parametrize("seed", range(3))
def test_each_gate_is_the_best_of_the_grid_given_those_before_it(seed: int) -> None:
    log, costs = random_log(seed), [1.0, 1.3, 2.0, 2.4]
    chosen = choose(log, "graft", costs)
    for gate in range(3):
        speeds = [slow_speed(log, "graft", costs, [*chosen[:gate], threshold]) for threshold in GRID]
        assert chosen[gate] == GRID[speeds.index(max(speeds))]
    assert speed(log, "graft", costs, chosen) == pytest.approx(slow_speed(log, "graft", costs, chosen))


def test_where_stopping_saves_nothing_the_gates_stay_open_and_where_drafts_never_help_they_shut() -> None:
    log = random_log(7, rows=1)
    assert choose(log, "prune", [2.0, 2.0, 2.0, 2.0]) == [0.0, 0.0, 0.0]
    useless = {name: torch.ones_like(tokens) for name, tokens in log.tokens.items()}
    shut = choose(Log(log.confidence, useless, log.counts), "prune", [1.0, 1.5, 2.0, 3.0])
    assert (log.confidence[..., 0][log.counts] <= shut[0]).float().mean() > 0.9


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    made = World(tmp_path_factory.mktemp("calibrated"))
    entry(calibrate.main, made.beside())
    return made


def test_gates_are_stored_with_what_they_were_calibrated_on(world: World) -> None:
    found = json.loads((world.folder / "drafter" / "calibrated.json").read_text())
    assert found["shape"] == {"nodes": 4, "depth": 2, "branch": 2} and found["prompts"] == 18 and found["rounds"] > 0
    for name in CALIBRATED:
        assert len(found["gates"][name]) == 3 and found["gates"][name][2] == 0.5  # this tree has two gates
        expected = found["expected"][name]
        assert len(expected["ms_a_round_by_stage"]) == len(expected["tokens_a_round_by_stage"]) == 3
        assert expected["tokens_per_s"] >= expected["tokens_per_s_open"]
    assert not [path for path in (world.folder / "drafter").iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("size", [2, 3, 7])
def test_prompts_are_repeated_to_whole_batches(tiny_target: Callable[..., Any], size: int) -> None:
    """Fewer prompts than a batch too."""
    recipe = replace(Recipe(), eval=EvalConfig(batch_size=size, max_prompt=200))
    prompts = [Prompt(name, ["a b c"]) for name in "abc"]
    rows = [row for _, rows in calibrate.batches_of(recipe, tiny_target(), prompts) for row in rows]
    whole = -(-3 // size) * size
    assert rows == [row_id("abc"[k % 3], 0) for k in range(whole)]


def gates_run(world: World, *extra: str) -> dict[str, Any]:
    arguments = ("eval.decoders=[prune,graft,splice]", "eval.limit=1", "eval.lossless=-1", *extra)
    entry(run.main, world.arguments(*arguments))
    tables = {
        name: json.loads((world.folder / "out" / f"results-{name}.json").read_text())
        for name in (*CALIBRATED, "splice")
    }
    return {name: (table["settings"]["gates"], table["settings"]["gates_from"]) for name, table in tables.items()}


def test_a_run_uses_them_by_default_and_says_so(world: World) -> None:
    found = json.loads((world.folder / "drafter" / "calibrated.json").read_text())
    used = gates_run(world)
    for name in CALIBRATED:
        assert used[name][0] == found["gates"][name] and "calibrated on 18 prompts" in used[name][1]
    assert used["splice"] == used["graft"], "what is retrieved differs, not where drafting stops"
    assert "calibrated on 18 prompts" in (world.folder / "out" / "report.md").read_text()
    assert gates_run(world, "eval.gates=[0.3,0.2,0.1]")["graft"] == ([0.3, 0.2, 0.1], "the recipe's")


def test_a_drafter_that_states_no_target_keeps_its_gates(world: World) -> None:
    papers = world.folder / "drafter" / "provenance.json"
    kept = papers.read_text()
    papers.write_text("{}")
    try:
        found = calibrated.read(papers.parent)
        assert found is not None and "calibrated on 18 prompts" in found["words"]
    finally:
        papers.write_text(kept)


@pytest.mark.parametrize(("key", "words"), [("drafter", "other weights"), ("target", "another target")])
def test_gates_of_another_drafter_or_target_are_set_aside(
    world: World, capsys: pytest.CaptureFixture[str], key: str, words: str
) -> None:
    path = world.folder / "drafter" / "calibrated.json"
    kept = path.read_text()
    path.write_text(json.dumps(json.loads(kept) | {key: "feedbeef"}))
    used = gates_run(world)
    path.write_text(kept)
    assert words in capsys.readouterr().out
    assert used["graft"][0] == [0.15, 0.14, 0.5] and used["graft"][1].startswith("published for another target")


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        "[" * 100_000,
        '{"gates": {"graft": [0.1, 0.2, 2], "prune": [0, 0, 0]}}',
        '{"gates": {"graft": [0.1, 0.2, true], "prune": [0, 0, 0]}}',
        '{"gates": {"graft": [0.1, 0.2, 1' + "0" * 400 + '], "prune": [0, 0, 0]}}',
    ],
)
def test_a_damaged_file_is_refused(world: World, capsys: pytest.CaptureFixture[str], text: str) -> None:
    path = world.folder / "drafter" / "calibrated.json"
    kept = path.read_text()
    path.write_text(text)
    with pytest.raises(SystemExit) as stop:
        entry(run.main, world.arguments())
    path.write_text(kept)
    assert stop.value.code == 2 and "is not a calibrated.json of ours" in capsys.readouterr().err


def test_its_matrix_is_where_a_run_may_start(world: World) -> None:
    file = world.folder / "drafter" / "graft" / "matrix.safetensors"
    assert [p.name for p in (world.folder / "drafter").glob("*.safetensors")] == ["model.safetensors"]
    entry(run.main, world.arguments(f"eval.matrix={file}", "eval.decoders=[recycle,graft]", "eval.limit=2"))
    for name, state in (("recycle", str(file)), ("graft", str(file)), ("graft-cold", "cold")):
        table = json.loads((world.folder / "out" / f"results-{name}.json").read_text())
        assert table["settings"]["matrix"] == state


def test_want_of_memory_is_told_and_writes_nothing(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError

    path = world.folder / "drafter" / "calibrated.json"
    before = path.read_bytes()
    monkeypatch.setattr(calibrate, "measured_costs", fails)
    with pytest.raises(SystemExit) as stop:
        entry(calibrate.main, world.beside("eval.batch_size=6"))
    assert stop.value.code == 2 and "out of memory at batch 6. Try 3" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_a_dry_run_loads_and_writes_nothing(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "load_target", None)
    entry(calibrate.main, world.beside("dry_run=true"))
    assert "18 validation prompts" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        entry(calibrate.main, world.beside(f"drafter={tmp_path / 'nowhere'}"))
    assert "no such folder" in capsys.readouterr().err
