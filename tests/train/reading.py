"""What a run left behind."""

import json
from pathlib import Path


def curve(run_dir: Path, key: str) -> list[float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [float(line[key]) for line in lines if key in line]
