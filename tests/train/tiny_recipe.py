"""A recipe for the entry points on a tiny target: a prompt file, and what every family's run sets the same."""

import json
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from recipes.loading import load
from recipes.schema import Recipe

WORDS = ["fox", "dog", "quick", "lazy", "brown", "jumps", "over", "the", *"abcdefghijklmnopqrstuvwxyz"]


def prompts(path: Path, count: int, first: int) -> Path:
    lines = [" ".join(WORDS[(first + i * 7 + j * (i + 3)) % len(WORDS)] for j in range(6)) for i in range(count)]
    path.write_text(
        "".join(
            json.dumps({"id": f"{path.stem}-{i}", "category": "x", "turns": [t]}) + "\n" for i, t in enumerate(lines)
        )
    )
    return path


def written(folder: Path, model: Path, training: int, report: int, changes: str) -> list[str]:
    """tiny.yaml in the folder, with so many prompts to train on and to report on; the arguments that name it. `changes`
    is YAML that is laid over it."""
    source = {"kind": "file", "path": str(prompts(folder / "training.jsonl", training, 0))}
    data: dict[str, Any] = {"max_length": 96, "answer_tokens": 16, "drop_loops": False, "cache": str(folder / "cache")}
    train = {"batch_tokens": 400, "micro_batch_tokens": 200, "learning_rate": 1e-3, "log_every": 1, "tracker": "none"}
    evaluation = {"prompts": str(prompts(folder / "report.jsonl", report, 11)), "max_new_tokens": 12, "matrix": "cold"}
    data["sources"] = {"mine": source}
    common = {"target": {"path": str(model)}, "data": data, "train": train, "eval": evaluation}
    OmegaConf.save(OmegaConf.merge(common, OmegaConf.create(changes)), folder / "tiny.yaml")
    return [f"recipe={folder / 'tiny.yaml'}"]


def recipe(arguments: list[str], run_dir: Path, *more: str) -> Recipe:
    return load([*arguments, f"run_dir={run_dir}", *more])
