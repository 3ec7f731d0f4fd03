"""The benchmark of generation runs on a CPU with tiny numbers, and counts the same tokens on both sides."""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_model_folder

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "scripts" / "bench_generate.py"


def test_it_runs_and_compares(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path / "model", max_position_embeddings=2048)
    (tmp_path / "asked.jsonl").write_text("".join(f'{{"prompt": "count to {i}"}}\n' for i in range(5)))
    line = [sys.executable, str(SCRIPT), f"target={folder}", "device=cpu", "count=6", "new=5", "slots=3", "batches=2,4"]
    for more in ([], [f"prompts={tmp_path / 'asked.jsonl'}", "temperature=0", "batches=2,5"]):
        done = subprocess.run([*line, *more], capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        found = re.findall(r"^(ours|generate), (?:batch )?\d+(?: slots)? +(\d+) +(\d+) ", done.stdout, re.MULTILINE)
        assert [who for who, _, _ in found] == ["ours", "generate", "generate"]
        assert re.search(r"^ours.* \d+%$", done.stdout, re.MULTILINE) and "byte floor" in done.stdout
        assert re.search(r"ours is \d+\.\d+ times as fast", done.stdout)
    assert found[0][1:] == found[-1][1:] and found[0][1] == "5"  # greedy, all prompts: both say the same
    wrong = subprocess.run([*line, "slot=3"], capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False)
    assert wrong.returncode == 1 and "unknown: slot" in wrong.stderr


@pytest.fixture(scope="module")
def bench() -> Any:
    spec = importlib.util.spec_from_file_location("bench_generate", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_byte_floor_counts_every_read(bench: Any, tiny_target: Callable[..., Any]) -> None:
    target = tiny_target()
    prompts, outputs, slots = [[1] * 7, [1] * 3, [1] * 2], [[1] * 5, [1], [1] * 9], 2
    decoded = [0, 0]  # steps of two slots, and tokens of the cache that were read
    for prompt, output in zip(prompts, outputs, strict=True):
        for made in range(1, len(output)):  # the first came with the prompt
            decoded[0] += 1
            decoded[1] += len(prompt) + made
    steps = max(8, decoded[0] / slots)
    tied = target.embed_weight.data_ptr() == target.head_weight.data_ptr()
    weights = sum(p.nbytes for p in target.model.parameters()) - (0 if tied else target.embed_weight.nbytes)
    entry = 2 * target.n_layers * target.n_kv * target.head_dim * 4
    assert bench.floor_bytes(target, prompts, outputs, slots) == steps * weights + decoded[1] * entry
