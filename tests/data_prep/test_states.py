"""The target's states on disk: what is read is what the target says, and nothing else is ever taken for it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from data_prep import states
from data_prep.run import prepare
from data_prep.state_store import CHECK, KEY, Layout, StateStore, stored, write_shard
from data_prep.supervision import supervised, teaching
from data_prep.teacher import Features, read_features
from models.target import Target, load_target
from recipes.loading import save
from recipes.schema import Recipe, TargetConfig, UserError
from tests.data_prep import write_states

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def target(target_folder: Path) -> Target:
    return load_target(TargetConfig(path=str(target_folder)))


@pytest.fixture(scope="module")
def written(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Layout:
    """A store that no test may change."""
    layout = write_states.layout(target, tmp_path_factory.mktemp("written"))
    states.write(layout, layout.missing(), lambda: target, 0, 1)
    return layout


@pytest.fixture
def copied(written: Layout, tmp_path: Path) -> Layout:
    shutil.copytree(written.folder, tmp_path / written.folder.name)
    return replace(written, root=tmp_path)


def online(target: Target, layout: Layout, row: int) -> Features:
    ids, answer = layout.rows.row(row)
    return read_features(target, target.features(ids.unsqueeze(0)), teaching(answer))


def shard_bytes(layout: Layout) -> dict[Path, bytes]:
    return {path.relative_to(layout.folder): path.read_bytes() for path in layout.folder.rglob("*.safetensors")}


@settings(deadline=None)
@given(marks=st.lists(st.integers(0, 2), min_size=1, max_size=12), steps=st.integers(1, 5))
def test_what_teaches_at_any_step_teaches_at_the_first(marks: list[int], steps: int) -> None:
    answer_T = torch.tensor(marks)
    expected = torch.zeros(len(marks), dtype=torch.bool)
    for i, slots in enumerate(supervised(answer_T, steps).tolist()):
        for p, counts in enumerate(slots):
            if counts:
                expected[p + 1 + i] = True
    assert torch.equal(teaching(answer_T), expected)


@pytest.mark.parametrize("pack", [[0], [17, 3, 5], [6], [12, 13], list(range(18))])
def test_what_is_read_is_what_the_target_says_rounded_to_bf16(target: Target, written: Layout, pack: list[int]) -> None:
    """In whatever order and company; rows that teach nothing are among them."""
    found = StateStore(written).read(pack).features(torch.device("cpu"), torch.float32)
    parts = [online(target, written, row) for row in pack]
    expected = Features(*(torch.cat(of_all) for of_all in zip(*parts, strict=True)))
    assert torch.equal(found.taps_TC, expected.taps_TC.bfloat16().float())
    assert torch.equal(found.final_mH, expected.final_mH.bfloat16().float())
    assert torch.equal(found.best_m, expected.best_m)
    assert torch.equal(found.lse_m, expected.lse_m)


def test_shards_hold_all_rows_once_in_runs_of_about_equal_size(target: Target, tmp_path: Path) -> None:
    for lengths in ([5], [7] * 15, [7] * 16, [400, *[9] * 40], [*[9] * 40, 400], [3] * 1000):
        layout = write_states.layout(target, tmp_path, write_states.rows(lengths))
        assert [row for span in layout.spans for row in span] == list(range(len(lengths)))
        assert len(layout.spans) == min(16, len(lengths))
        sizes = [sum(layout.sizes[row] for row in span) for span in layout.spans]
        assert max(sizes) <= sum(sizes) / len(sizes) + 2 * max(layout.sizes)


@settings(deadline=None)
@given(
    values=st.lists(st.floats(-1e4, 1e4, width=32), min_size=8, max_size=8),
    zero=st.booleans(),
    factor=st.sampled_from([1.0, 1e-6, 1e6]),
)
def test_fp8_keeps_each_value_to_a_sixteenth_and_to_a_millionth_of_its_taps_largest(
    values: list[float], zero: bool, factor: float
) -> None:
    taps_TC = (torch.tensor(values).float() * factor).view(1, 8)
    if zero:
        taps_TC[:, 4:] = 0
    nothing = torch.zeros(0)
    kept = stored(Features(taps_TC, torch.zeros(0, 4), nothing, nothing), "fp8", 2)
    back = kept.features(torch.device("cpu"), torch.float32).taps_TC
    for i, (value, again) in enumerate(zip(taps_TC[0].tolist(), back[0].tolist(), strict=True)):
        largest = float(taps_TC[0, i // 4 * 4 : i // 4 * 4 + 4].abs().max())
        assert abs(value - again) <= abs(value) / 16 * 1.001 + largest / 448 / 2**10 * 1.001 + 1e-37


@pytest.mark.parametrize(("kind", "count", "length"), [("bf16", 40, 300), ("fp8", 40, 300), ("bf16", 300, 80)])
def test_the_size_is_known_before_it_is_written(
    target: Target, tmp_path: Path, kind: str, count: int, length: int, capsys: pytest.CaptureFixture[str]
) -> None:
    of = write_states.rows([length] * count)
    layout = write_states.layout(target, tmp_path, of, kind)
    estimated = layout.size(layout.missing())
    states.write(layout, layout.missing(), lambda: target, 0, 1)
    assert f"{estimated:,} bytes" in capsys.readouterr().out
    actual = sum(path.stat().st_size for path in layout.folder.rglob("*") if path.is_file())
    assert estimated == pytest.approx(actual, rel=0.02)
    assert layout.missing() == [] and layout.size(layout.missing()) == 0


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = write_states.layout(target, tmp_path)
    needed = layout.size(layout.missing())
    monkeypatch.setattr("data_prep.state_store.free_bytes", lambda folder: needed - 1)
    with pytest.raises(UserError, match=rf"{needed:,} more bytes .* {needed - 1:,} are free .*data\.states=fp8.*rows"):
        states.write(layout, layout.missing(), lambda: target, 0, 1)
    assert not layout.folder.exists()
    monkeypatch.setattr("data_prep.state_store.free_bytes", lambda folder: needed)
    states.write(layout, layout.missing(), lambda: target, 0, 1)


def test_a_disk_that_fills_up_meanwhile_keeps_what_is_whole(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, calls = write_states.layout(target, tmp_path), []

    def full(tensors: dict[str, torch.Tensor], path: Path, papers: dict[str, str]) -> None:
        calls.append(path)
        if len(calls) == 4:
            path.write_bytes(b"half of it")
            raise OSError(28, "No space left on device")
        save_file(tensors, path, papers)

    monkeypatch.setattr("data_prep.state_store.save_file", full)
    with pytest.raises(UserError, match=r"No space left on device.*whole were kept"):
        states.write(layout, layout.missing(), lambda: target, 0, 1)
    assert len(layout.missing()) == len(layout.spans) - 3
    assert not list(layout.folder.glob(".*"))


def process(target_folder: Path, root: Path, *arguments: str) -> subprocess.Popen[bytes]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, write_states.__file__, str(target_folder), str(root), *arguments], env=environment
    )


def test_shares_of_any_number_of_processes_make_one_store(target: Target, written: Layout, tmp_path: Path) -> None:
    layout = replace(written, root=tmp_path)
    for rank in (2, 0, 1):
        states.write(layout, layout.missing(), lambda: target, rank, 3)
    assert shard_bytes(layout) == shard_bytes(written)
    states.write(layout, layout.missing(), lambda: pytest.fail("no target is needed where nothing is missing"), 0, 1)


@pytest.mark.slow
def test_two_processes_write_one_of_them_is_killed_and_a_third_finishes(
    target: Target, target_folder: Path, written: Layout, tmp_path: Path
) -> None:
    """Only what is missing is made, and the store is that of one process, bit for bit."""
    layout = replace(written, root=tmp_path)
    first, second = process(target_folder, tmp_path, "0", "2", "0.3"), process(target_folder, tmp_path, "1", "2")
    with first, second:
        try:
            deadline = time.monotonic() + 120
            while not layout.path(0).is_file() and time.monotonic() < deadline:
                time.sleep(0.01)
        finally:
            first.send_signal(signal.SIGKILL)
        assert second.wait(120) == 0
    missing = layout.missing()
    assert missing and 0 not in missing and not any(n % 2 for n in missing)
    with pytest.raises(UserError, match="cannot be read"):
        StateStore(layout)
    before = {path: path.stat().st_mtime_ns for path in layout.folder.rglob("*.safetensors")}
    states.write(layout, layout.missing(), lambda: target, 0, 1)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert shard_bytes(layout) == shard_bytes(written)
    assert not list(layout.folder.rglob(".*"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: replace(x, target="another"), r"target \(its fingerprint\): written for another, now"),
        (lambda x: replace(x, taps=(1, 2, 3)), r"target\.taps: written for 1,2,3, now 2,4,5"),
        (
            lambda x: replace(x, dtype=torch.bfloat16),
            r"dtype of the target's forward: written for bfloat16, now f",
        ),
        (
            lambda x: replace(x, rows=write_states.rows(seed=1)),
            r"rows \(the hash of their tokens and marks\): ",
        ),
    ],
)
def test_a_shard_of_another_store_is_refused_by_name(
    target: Target, copied: Layout, tmp_path: Path, change: Callable[[Layout], Layout], words: str
) -> None:
    other = change(replace(copied, root=tmp_path / "other"))
    assert other.folder.name != copied.folder.name
    write_shard(other, 3, [states.read(other, target, [row]) for row in other.spans[3]])
    shutil.copy(other.path(3), copied.path(3))
    with pytest.raises(UserError, match=rf"shard-00003/states\.safetensors holds other states .*\n  {words}.*\nDelete"):
        StateStore(copied)


def test_a_shard_in_anothers_place_is_refused(copied: Layout) -> None:
    shutil.copy(copied.path(2), copied.path(3))
    with pytest.raises(UserError, match="rows of the shard, first and last: written for"):
        StateStore(copied)


def test_damaged_shards_are_refused_by_name_and_made_again(target: Target, copied: Layout, written: Layout) -> None:
    path = copied.path(1)
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(UserError, match=r"shard-00001/states\.safetensors cannot be read: .*Delete the shard's folder"):
        StateStore(copied)
    shutil.rmtree(path.parent)
    states.write(copied, copied.missing(), lambda: target, 0, 1)
    assert shard_bytes(copied) == shard_bytes(written)
    tensors = load_file(path)
    papers = {KEY: json.dumps(copied.papers(1))}
    save_file({name: t for name, t in tensors.items() if name != "lse"}, path, papers)
    with pytest.raises(UserError, match=r"shard-00001/states\.safetensors holds \{.*Delete"):
        StateStore(copied)
    tensors["ids"][0] += 1
    save_file(tensors, path, papers)
    store, (first, *_) = StateStore(copied), copied.spans[1]
    store.read([0])
    with pytest.raises(UserError, match=rf"shard-00001/.*: row {first} has other token ids than the prepared rows"):
        store.read([0, first])


def flipped(tensor: torch.Tensor) -> None:
    """One bit."""
    tensor.view(-1).view(torch.uint8)[1] ^= 1


@pytest.mark.parametrize("damage", [torch.Tensor.zero_, flipped], ids=["zeroed", "a bit"])
@pytest.mark.parametrize("name", ["taps", "scale", "final", "best", "lse"])
def test_damaged_values_are_refused_by_file_and_row(
    target: Target, tmp_path: Path, name: str, damage: Callable[[torch.Tensor], object]
) -> None:
    layout = write_states.layout(target, tmp_path, kind="fp8")
    states.write(layout, layout.missing(), lambda: target, 0, 1)
    path, (first, *_) = layout.path(2), layout.spans[2]
    tensors = load_file(path)
    damage(tensors[name])
    save_file(tensors, path, {KEY: json.dumps(layout.papers(2))})
    store = StateStore(layout)
    assert store.unchecked == ""
    store.read([0, 1])
    with pytest.raises(
        UserError, match=rf"shard-00002/.*: row {first} is not what was written there.*Delete the shard"
    ):
        store.read([0, first])


def test_a_store_from_before_there_were_checksums_is_read_and_told(copied: Layout, written: Layout) -> None:
    path = copied.path(1)
    tensors = {name: t for name, t in load_file(path).items() if name != CHECK}
    save_file(tensors, path, {KEY: json.dumps(copied.papers(1))})
    store = StateStore(copied)
    row = copied.spans[1][0]
    assert torch.equal(store.read([row]).taps_TC, StateStore(written).read([row]).taps_TC)
    assert f"1 of {len(copied.spans)} shards in {copied.folder} were written without checksums" in store.unchecked


def test_rows_read_together_are_those_read_alone(target: Target, written: Layout) -> None:
    """As a GPU writes them."""
    together = states.read(written, target, [3, 4, 5])
    alone = [states.read(written, target, [row]) for row in (3, 4, 5)]
    for name in ("taps_TC", "final_mH", "lse_m"):
        parts = torch.cat([getattr(part, name) for part in alone])
        torch.testing.assert_close(getattr(together, name).float(), parts.float(), atol=2e-2, rtol=2e-2)
    few = write_states.layout(target, Path(), write_states.rows([9, 9, 9, 30, 2] * 40))
    for number, span in enumerate(few.spans):
        found = [*states.batches(few, number, 20)]
        assert [row for rows in found for row in rows] == [*span]
        sizes = [sum(few.rows.lengths[rows].tolist()) for rows in found]
        assert all(size <= 20 or len(rows) == 1 for size, rows in zip(sizes, found, strict=True))
        assert max(map(len, found)) > 1


def test_the_command_writes_its_share_and_a_dry_run_knows_the_size(
    make_recipe: Callable[..., Recipe],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = make_recipe(states="bf16")
    with pytest.raises(UserError, match=r"data\.states=none"):
        states.main(make_recipe())
    states.main(replace(recipe, dry_run=True))
    assert "states: bf16, at most" in capsys.readouterr().out and not (tmp_path / "cache").exists()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"no prepared data for this recipe yet\. Run: python -m data_prep\.run"):
        states.main(recipe)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    states.main(replace(recipe, data=replace(recipe.data, states="fp8")))  # alone it prepares them itself
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    states.main(recipe)
    capsys.readouterr()
    states.main(replace(recipe, dry_run=True))
    assert "in 9 shards, 5 to be made" in capsys.readouterr().out
    monkeypatch.setenv("RANK", "0")
    states.main(recipe)
    states.main(replace(recipe, dry_run=True))
    assert "in 9 shards, 0 to be made" in capsys.readouterr().out
    assert [len([*folder.glob("shard-*")]) for folder in (tmp_path / "cache").glob("states-*")] == [9, 9]
    monkeypatch.setattr("data_prep.state_store.free_bytes", lambda folder: 100)
    states.main(replace(recipe, dry_run=True))
    for shard in (tmp_path / "cache").glob("states-*/shard-00003"):
        shutil.rmtree(shard)
    with pytest.raises(UserError, match="but 100 are free there"):
        states.main(replace(recipe, dry_run=True))
    with pytest.raises(UserError, match=r"train\.precision=fast is timed by each process.*Give train\.precision=bf16"):
        states.main(replace(recipe, train=replace(recipe.train, precision="fast")))
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(UserError, match="RANK=2 and WORLD_SIZE=2 name no process"):
        states.main(recipe)


@pytest.mark.slow
def test_the_file_runs_under_a_launcher_from_any_folder_and_what_it_wrote_is_timed(
    make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    recipe = make_recipe(states="fp8")
    prepare(recipe, lambda dtype: load_target(recipe.target, "cpu", dtype))
    save(recipe, tmp_path / "recipe.yaml")
    line = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    line += [f"{ROOT}/recipes/accelerate/ddp.yaml", f"{ROOT}/data_prep/states.py", f"recipe={tmp_path}/recipe.yaml"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")} | {"OMP_NUM_THREADS": "1"}
    subprocess.run(line, cwd=tmp_path, env=environment, check=True, timeout=300)
    assert len([*(tmp_path / "cache").glob("states-*/shard-*/states.safetensors")]) == 9
    line = [sys.executable, f"{ROOT}/scripts/bench_states.py", f"recipe={tmp_path}/recipe.yaml"]
    done = subprocess.run(line, cwd=tmp_path, env=environment, check=True, timeout=300, capture_output=True, text=True)
    for words in ("written and flushed", "read from the disk", "read from the page cache"):
        assert f"\n{words}: " in done.stdout
