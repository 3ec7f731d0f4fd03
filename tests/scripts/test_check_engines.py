"""The comparison with vLLM, without vLLM: what it would have answered is made up, right and wrong."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from models.layouts import save_drafter
from models.target import Target
from tests.tiny import tiny_drafter

ROOT = Path(__file__).parent.parent.parent


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def work(tiny_target: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which our half has decoded."""
    folder = tmp_path_factory.mktemp("engines")
    target: Target = tiny_target("llama", max_position_embeddings=1024)
    drafter = tiny_drafter(target, [i for i in range(320) if i % 3], noise=0.02)
    save_drafter(drafter, folder / "drafter", {"fingerprint": target.fingerprint})
    (folder / "tiny.yaml").write_text(f"target: {{path: {target.folder}}}\ndata: {{sources: {{}}}}\n")
    done = run(folder, "decode")
    assert done.returncode == 0, done.stderr
    return folder


def run(folder: Path, mode: str) -> subprocess.CompletedProcess[str]:
    words = [f"recipe={folder / 'tiny.yaml'}", str(folder / "drafter"), "prompts=4", "new=24", f"out={folder / 'out'}"]
    line = [sys.executable, str(ROOT / "scripts" / "check_engines.py"), mode, str(folder), *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)


def answered(folder: Path) -> dict[str, Any]:
    """vLLM's file, had it done the same."""
    ours = json.loads((folder / "ours.json").read_text())
    held = {"model.fc.weight": 5e-7, "model.norm.weight": "equal", "model.embed_tokens.weight": "the target's, shared"}
    drafters = {name: {**found, "weights": held} for name, found in ours["drafters"].items()}
    return {"version": "0.0", "plain": ours["plain"], "drafters": drafters}


def another_count(found: dict[str, Any]) -> None:
    found["accepted"][1][0] += 1


def another_token(found: dict[str, Any]) -> None:
    found["tokens"][2][5] += 1


def a_hole(found: dict[str, Any]) -> None:
    found["weights"]["model.fc.weight"] = "never filled"


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (None, 0, "all as it must be"),
        (another_count, 1, "WRONG COUNT"),
        (another_token, 1, "1 DIFFERENT"),
        (a_hole, 1, "WRONG: ['model.fc.weight']"),
    ],
)
def test_what_differs_is_found(
    work: Path, change: Callable[[dict[str, Any]], None] | None, code: int, words: str
) -> None:
    theirs = answered(work)
    if change:
        change(next(iter(theirs["drafters"].values())))
    (work / "vllm.json").write_text(json.dumps(theirs))
    done = run(work, "compare")
    assert done.returncode == code and words in done.stdout, done.stdout + done.stderr
    assert (work / "out" / "engines.md").read_text() in done.stdout


def test_engine_parameters_are_made_of_the_stored_tensors() -> None:
    vllm = script("check_engines_vllm")
    parts = {f"layers.0.self_attn.{n}_proj.weight": torch.full((1, 1), float(i)) for i, n in enumerate("qkv")}
    stored = parts | {"d2t": torch.zeros(3), "norm.weight": torch.ones(2)}
    fused = vllm.sources("model.layers.0.self_attn.qkv_proj.weight", stored)
    assert torch.cat(fused).flatten().tolist() == [0, 1, 2]
    assert vllm.sources("draft_id_to_target_id", stored) == [stored["d2t"]]
    assert vllm.sources("model.fc.weight", stored) == [None]
    assert vllm.compare(None, "weight", torch.ones(2), [None], False) == "never filled"
    assert vllm.compare(None, "weight", torch.ones(2), [torch.ones(2)], False) == "equal"
    assert vllm.compare(None, "weight", torch.ones(2), [torch.zeros(2)], False) == "differs"
