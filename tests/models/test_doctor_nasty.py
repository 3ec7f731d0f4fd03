"""Folders that nobody would make on purpose: the doctor gives a verdict and neither waits nor crashes."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.doctor import examine
from models.layouts import check_drafter
from models.target import Target
from recipes.schema import UserError
from tests.models.test_doctor import Edit, config, export, rename, to_speculators, weights
from tests.tiny import tiny_model_folder

INDEX = "model.safetensors.index.json"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def target(tiny_target: Callable[..., Any]) -> Target:
    found: Target = tiny_target("llama")
    return found


def mask(folder: Path) -> None:
    weights(folder, lambda t: t.update({"mask_hidden": torch.zeros(1, 96)}))


def peagle(folder: Path) -> None:
    config(folder, architectures=["PEagleDraftModel"], pard_token=7)
    mask(folder)


def peagle_without_a_token(folder: Path) -> None:
    peagle(folder)
    config(folder, pard_token=None)


def peagle_of_speculators(folder: Path) -> None:
    to_speculators(folder, speculators_model_type="peagle", mask_token_id=7)
    mask(folder)


def shards(folder: Path, **changes: Any) -> None:
    """Two files and their index, some of its entries changed."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(names.values()):
        save_file({n: t for n, t in tensors.items() if names[n] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": names | changes}))


def no_map(folder: Path) -> None:
    shards(folder)
    (folder / INDEX).write_text('{"weight_map": [1, 2]}')


def one_shard(folder: Path) -> None:
    shards(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def instead(name: str, make: Callable[[Path], Any]) -> Edit:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return change


def readme_alone(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "README.md").write_text("# A drafter")


def whole_model(folder: Path) -> None:
    shutil.rmtree(folder)
    tiny_model_folder(folder)


def fp8(folder: Path) -> None:
    weights(folder, lambda t: t.update({n: x.to(torch.float8_e4m3fn) for n, x in t.items() if "proj" in n}))


def two_names(folder: Path) -> None:
    weights(folder, lambda t: t.update({"layers.0.hidden_norm.weight": t["midlayer.hidden_norm.weight"].clone()}))


def huge_header(path: Path) -> None:
    path.write_bytes((1 << 60).to_bytes(8, "little") + b"{}")


def no_rope(folder: Path) -> None:
    config(folder, rope_theta=None)
    merged = json.loads((folder / "config.json").read_text()) | {"rope_parameters": None}
    (folder / "config.json").write_text(json.dumps(merged))


def offsets(change: Callable[[Any], Any]) -> Edit:
    return lambda folder: weights(folder, lambda t: t.update(d2t=change(t["d2t"].clone())))


def swapped(d2t: Any) -> Any:
    """The first two draft ids say each other's tokens."""
    first, second = int(d2t[0]), int(d2t[1])
    d2t[0], d2t[1] = second + 1, first - 1
    return d2t


def doubled(d2t: Any) -> Any:
    d2t[5] = d2t[4] - 1
    return d2t


NASTY: dict[str, tuple[Edit, str, str]] = {
    # name: (what is made of a good folder, engines that serve it, words of a finding)
    "P-EAGLE": (peagle, "vLLM", "SGLang cannot serve P-EAGLE"),
    "P-EAGLE without a mask token": (peagle_without_a_token, "", "no mask token is named"),
    "P-EAGLE, speculators": (peagle_of_speculators, "vLLM", "SGLang cannot serve P-EAGLE"),
    "sharded": (shards, "vLLM SGLang", ""),
    "a shard gone": (one_shard, "", "model-00002-of-00002.safetensors, which is not there"),
    "an index that leaves the folder": (lambda f: shards(f, **{"fc.weight": "../fc.safetensors"}), "", "not there"),
    "an index without a map": (no_map, "", "no weight_map that names files"),
    "a header of 2^60 bytes": (instead("model.safetensors", huge_header), "", "header too large"),
    "a pipe for weights": (instead("model.safetensors", os.mkfifo), "", "model.safetensors is no file"),
    "a pipe for a config": (instead("config.json", os.mkfifo), "", "config.json is no file"),
    "a folder for a config": (instead("config.json", Path.mkdir), "", "config.json is no file"),
    "a README alone": (readme_alone, "", "no config.json"),
    "a whole model": (whole_model, "", "not a drafter"),
    "fp8": (fp8, "", "no plain floats"),
    "infinity in one gain": (lambda f: weights(f, lambda t: t["norm.weight"].fill_(torch.inf)), "", "NaN or infinity"),
    "no RoPE at all": (no_rope, "vLLM SGLang", ""),
    "a tensor under two names": (two_names, "", "stored under two names"),
    "offsets not ascending": (offsets(swapped), "vLLM SGLang", "Espalier's own reader does not"),
    "two draft ids for one token": (offsets(doubled), "", "several draft ids to one target id"),
    "offsets too few": (offsets(lambda d2t: d2t[:-3]), "", "d2t is [210], draft_vocab_size is 213"),
    "offsets as a matrix": (offsets(lambda d2t: d2t[None]), "", "d2t is [1, 213]"),
    "an epsilon that is none": (lambda f: config(f, rms_norm_eps=float("nan")), "", "rms_norm_eps=nan"),
    "a prefix on one name": (lambda f: rename(f, "fc.weight", "model.fc.weight"), "SGLang", "`model.`"),
}  # fmt: skip


@pytest.mark.parametrize("name", NASTY)
def test_a_nasty_folder_gets_its_verdict(target: Target, tmp_path: Path, name: str) -> None:
    change, served, words = NASTY[name]
    folder = export(target, tmp_path / "d")
    change(folder)
    report = examine(folder)
    assert " ".join(r.engine for r in report.readings if r.verdict == "serves") == served, report.findings
    assert words in "\n".join(f.what for f in report.findings)
    assert report.fatal == (served not in ("vLLM", "vLLM SGLang"))


def test_parallel_drafting_is_in_the_command(target: Target, tmp_path: Path) -> None:
    folder = export(target, tmp_path / "d")
    peagle(folder)
    report = examine(folder)
    assert report.kind.startswith("P-EAGLE") and '"parallel_drafting": true' in report.readings[0].command
    assert report.readings[1].command == ""


def test_a_count_beyond_any_model_is_refused_before_anything_is_made_of_it(target: Target, tmp_path: Path) -> None:
    folder = export(target, tmp_path / "d")
    config(folder, num_aux_hidden_states=10**9)
    assert "fc.weight is [32, 96]" in examine(folder).findings[0].what
    with pytest.raises(UserError, match="num_aux_hidden_states=1000000000: no target has as many layers"):
        check_drafter(folder, None)


def test_a_reader_that_goes_away_ends_the_report_without_a_word(target: Target, tmp_path: Path) -> None:
    """As `| head -1` does."""
    export(target, tmp_path / "drafter")
    command = [sys.executable, "-m", "models.doctor", str(tmp_path / "drafter")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert said == "" and process.returncode == 1
