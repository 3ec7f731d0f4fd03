"""Shards: whole or absent, never mixed, and the same after any number of kills as without one."""

import json
import multiprocessing
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep import shards
from data_prep.run import prepare
from models.target import Target, load_target
from recipes.schema import Recipe, SourceConfig, TargetConfig, UserError

Maker = Callable[..., Recipe]


@pytest.fixture(scope="module")
def target(target_folder: Path) -> Target:
    return load_target(TargetConfig(path=str(target_folder)), "cpu", torch.float32)


@pytest.fixture
def many(make_recipe: Maker, tmp_path: Path) -> Callable[[str], Recipe]:
    """A recipe of four shards of dialogues, half of them of two turns, in a cache of the given name."""
    path = tmp_path / "many.jsonl"
    turns = [[f"count to {i} for me"] + ["and back again"] * (i % 2) for i in range(64)]
    path.write_text("".join(json.dumps({"id": f"p{i}", "turns": t}) + "\n" for i, t in enumerate(turns)))
    sources = {"asked": SourceConfig(path=str(path))}
    return lambda cache: make_recipe(sources=sources, slots=1, answer_tokens=8, cache=str(tmp_path / cache))


def content(recipe: Recipe) -> dict[str, bytes]:
    """Every file of the answers stage but its report, which tells how long it took."""
    [folder] = Path(recipe.data.cache).glob("answers-*")
    files = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    assert files.pop("report.json")
    return files


def test_spans_cover_every_row_once() -> None:
    for count in (0, 1, 7, 16, 17, 100):
        spans = shards.spans(count, 16)
        assert [i for span in spans for i in span] == [*range(count)]
        assert all(0 < len(span) <= 16 for span in spans)


def test_killed_at_random_moments_ends_with_the_same_bytes(many: Callable[[str], Recipe], target: Target) -> None:
    """Processes forked from this one, so that what they spend is generation and not imports."""
    began = time.monotonic()
    prepare(many("whole"), lambda dtype: target)
    whole = time.monotonic() - began
    fork, source, killed = multiprocessing.get_context("fork"), random.Random(0), 0
    recipe = many("killed")
    for _ in range(10):
        process = fork.Process(target=prepare, args=(recipe, lambda dtype: target))
        process.start()
        process.join(source.uniform(0.02, 0.5) * whole)
        if process.is_alive():
            killed += 1
            process.kill()
            process.join()
        else:  # faster than the kill: as good a run as any, and a new one is begun
            assert content(recipe) == content(many("whole"))
            shutil.rmtree(Path(recipe.data.cache))
    assert killed >= 3
    prepare(recipe, lambda dtype: target)
    assert content(recipe) == content(many("whole"))
    assert len({name.split("/")[0] for name in content(recipe)}) == 5  # four shards and the manifest; nothing aside


@pytest.mark.slow
def test_the_command_killed_ten_times_ends_with_the_same_bytes(
    many: Callable[[str], Recipe], tmp_path: Path, target_folder: Path
) -> None:
    def command(cache: str) -> list[str]:
        data = many(cache).data
        path = tmp_path / f"{cache}.yaml"
        sources = f"{{asked: {{path: {data.sources['asked'].path}}}}}"
        path.write_text(
            f"target: {{path: {target_folder}}}\ndevice: cpu\neagle: {{draft_vocab: 64}}\n"
            f"data: {{sources: {sources}, max_length: 96, answer_tokens: 12, temperatures: [1.0, 0.0], slots: 1, "
            f"dtype: float32, drop_loops: false, cache: {data.cache}}}\n"
        )
        return [sys.executable, "-m", "data_prep.run", f"recipe={path}"]

    subprocess.run(command("whole"), check=True, capture_output=True)
    [report] = Path(many("whole").data.cache).glob("answers-*/report.json")
    seconds = json.loads(report.read_text())["seconds"]
    source = random.Random(1)
    left: list[int] = []  # shards that were whole when the process was killed
    cache = Path(many("killed").data.cache)
    while len(left) < 10:
        process = subprocess.Popen(command("killed"), stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            if "the target is loaded" in line:  # now it generates
                break
        time.sleep(source.uniform(0.0, 0.3) * seconds)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
            left.append(len([*cache.glob("answers-*/shard-*")]))
        else:  # faster than the kill: as good a run as any, and a new one is begun
            assert content(many("killed")) == content(many("whole"))
            shutil.rmtree(cache)
    assert len(set(left)) > 1
    subprocess.run(command("killed"), check=True, capture_output=True)
    assert content(many("killed")) == content(many("whole"))


def test_an_unfinished_run_goes_on_on_its_own_schedule(
    many: Callable[[str], Recipe], target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(many("whole"), lambda dtype: target)
    recipe = many("changed")
    prepare(recipe, lambda dtype: target)
    [folder] = Path(recipe.data.cache).glob("answers-*")
    unfinish(folder, 2)
    prepare(replace(recipe, data=replace(recipe.data, slots=7)), lambda dtype: target)
    assert "shards were begun with slots=1, not 7" in capsys.readouterr().out
    assert content(recipe) == content(many("whole"))


def test_another_model_or_sampling_is_refused(many: Callable[[str], Recipe], target: Target) -> None:
    """Folders are named by what made them; a manifest that says otherwise (a copied folder) is not added to."""
    recipe = many("one")
    prepare(recipe, lambda dtype: target)
    [folder] = Path(recipe.data.cache).glob("answers-*")
    manifest = json.loads((folder / "manifest.json").read_text())
    for key, value in (
        ("model", "another"),
        ("temperatures", [0.5]),
        ("template_args", {"x": 1}),
        ("writer", "server"),
    ):
        unfinish(folder, 1)
        (folder / "manifest.json").write_text(json.dumps({**manifest, key: value}))
        with pytest.raises(UserError, match=f"cannot be mixed(.|\n)*  {key}: "):
            prepare(recipe, lambda dtype: target)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    report = folder / "shard-00000" / "report.json"
    report.write_text(report.read_text().replace(shards.identity(manifest), "0" * 24))
    with pytest.raises(UserError, match="another manifest"):
        prepare(recipe, lambda dtype: target)


def unfinish(folder: Path, shard: int) -> None:
    (folder / "report.json").unlink(missing_ok=True)
    shutil.rmtree(shards.path_of(folder, shard), ignore_errors=True)


def test_scraps_of_a_killed_process_are_swept_up(tmp_path: Path) -> None:
    (tmp_path / ".shard-00001.77" / "rows").mkdir(parents=True)
    manifest: dict[str, Any] = {"model": "m", "slots": 1}
    assert shards.begin(tmp_path, manifest) == manifest
    assert [p.name for p in tmp_path.iterdir()] == ["manifest.json"]
