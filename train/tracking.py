"""Where metrics go: `metrics.jsonl` always, and a tracker that may fail without anyone waiting for it."""

import contextlib
import hashlib
import importlib.util
import json
import netrc
import os
import warnings
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from recipes.files import write_text

PROJECT = "espalier"


class Tracking:
    """Metrics of one run; lives on the main process only. On resume, lines after the resumed step are dropped."""

    def __init__(self, run_dir: Path, step: int, accelerator: Accelerator, kind: str, config: dict[str, Any]) -> None:
        self.path = run_dir / "metrics.jsonl"
        truncate(self.path, step)
        self.file = self.path.open("a", encoding="utf-8")
        self.accelerator = accelerator
        self.live = kind == "wandb" and self._start(run_dir, config)

    def _start(self, run_dir: Path, config: dict[str, Any]) -> bool:
        if importlib.util.find_spec("wandb") is None:
            return False
        try:
            if not has_key():
                os.environ.setdefault("WANDB_MODE", "offline")
            os.environ.setdefault("WANDB_INIT_TIMEOUT", "20")
            os.environ.setdefault("WANDB_SILENT", "true")
            name = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:12]
            init = {"dir": str(run_dir), "name": run_dir.name, "id": name, "resume": "allow"}
            self.accelerator.log_with = ["wandb"]
            self.accelerator.init_trackers(PROJECT, config=config, init_kwargs={"wandb": init})
        except Exception as error:  # a tracker's trouble, of whatever kind, is never the run's
            warnings.warn(f"wandb did not start, metrics.jsonl goes on alone: {error}", stacklevel=2)
            return False
        return True

    def log(self, step: int, values: dict[str, Any]) -> None:
        self.file.write(json.dumps({"step": step, **values}) + "\n")
        self.file.flush()
        if not self.live:
            return
        try:
            self.accelerator.log(flatten(values), step=step)
        except Exception as error:
            self.live = False
            warnings.warn(f"wandb stopped taking metrics, metrics.jsonl goes on alone: {error}", stacklevel=2)

    def close(self) -> None:
        self.file.close()
        with contextlib.suppress(Exception):
            if self.live:
                self.accelerator.end_training()


def truncate(path: Path, step: int) -> None:
    """Keep the lines up to `step`; a last line cut short by a kill goes too."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(entry, dict) and entry.get("step", 0) <= step:
            kept.append(line + "\n")
    write_text(path, "".join(kept))


def flatten(values: dict[str, Any]) -> dict[str, Any]:
    """Lists become one value an entry: acc -> acc/0, acc/1, ..."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= {f"{key}/{i}": v for i, v in enumerate(value)} if isinstance(value, list) else {key: value}
    return flat


def has_key() -> bool:
    """Whether wandb could log in without asking anybody."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        return False
