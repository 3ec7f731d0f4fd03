"""The benchmark of generation runs on a CPU with tiny numbers, and counts the same tokens on both sides."""

import re
import subprocess
import sys
from pathlib import Path

from tests.tiny import tiny_model_folder

ROOT = Path(__file__).parent.parent.parent


def test_it_runs_and_compares(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path / "model", max_position_embeddings=2048)
    (tmp_path / "asked.jsonl").write_text("".join(f'{{"prompt": "count to {i}"}}\n' for i in range(5)))
    line = [sys.executable, str(ROOT / "scripts" / "bench_generate.py"), f"target={folder}", "device=cpu", "count=6"]
    line += ["new=5", "slots=3", "batches=2,4", "sample=4", "runs=1"]
    for more in ([], [f"prompts={tmp_path / 'asked.jsonl'}", "temperature=0"]):
        done = subprocess.run([*line, *more], capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        found = re.findall(r"^(ours|generate), .*?: (\d+) useful tokens", done.stdout, re.MULTILINE)
        assert [who for who, _ in found] == ["ours", "generate", "generate", "generate"]
        assert re.search(r"byte floor \S+ s, \d+% of it reached", done.stdout)
        assert re.search(r"ours is \d+\.\d+ times as fast", done.stdout)
    tokens = [int(useful) for _, useful in found]
    assert tokens[0] == tokens[-1]  # greedy, both say the same
