"""The benchmark of tokenising runs in small, makes the lengths it says and compares two sizes."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_it_runs(tmp_path: Path) -> None:
    line = [sys.executable, str(ROOT / "scripts" / "bench_data.py"), "20", "400", "4"]
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.findall(r"^(\d+) dialogues, [\d,]+ tokens \((\d+) each\).*refused 0$", done.stdout, re.MULTILINE)
    assert [int(count) for count, _ in found] == [10, 20] and all(320 < int(length) < 480 for _, length in found)
    assert re.search(r"times the tokens took \d+\.\d+ times the time", done.stdout)
