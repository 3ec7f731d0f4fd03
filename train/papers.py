"""What a run folder says of where it comes from."""

import importlib.metadata
import platform
from pathlib import Path
from typing import Any

from data_prep.run import Prepared
from models.source import Source
from recipes.files import write_json, write_text
from recipes.loading import save
from recipes.schema import Recipe
from train.checkpoint import ROWS, STEP, TEACHER

VERSIONS = ("torch", "transformers", "accelerate", "deepspeed", "safetensors")


def hashes(source: Source | None) -> dict[str, str]:
    """Of the target, where it is at hand."""
    if source is None:
        return {}
    return {"target.fingerprint": source.fingerprint, "target.template": source.template_hash}


def data_hashes(prepared: Prepared) -> dict[str, str]:
    """Of what the rows were made from, and of themselves: the target may have written them again, in other words."""
    return {"data.hash": str(prepared.report["hash"]), ROWS: prepared.train.hash()}


def begin(recipe: Recipe, folder: Path, source: Source, prepared: Prepared, identity: dict[str, str]) -> None:
    """The run folder's papers."""
    save(recipe, folder / "recipe.yaml")
    write_json(folder / "provenance.json", provenance(recipe, source, prepared, identity))
    link = folder / "data"
    if link.is_symlink() and link.resolve() != prepared.folder.resolve():
        link.unlink()  # data.cache may be another than it was
    if not link.is_symlink() and not link.exists():
        try:
            link.symlink_to(prepared.folder.resolve(), target_is_directory=True)
        except OSError:  # a file system without links
            write_text(folder / "data.txt", f"{prepared.folder.resolve()}\n")


def provenance(recipe: Recipe, source: Source, prepared: Prepared, identity: dict[str, str]) -> dict[str, Any]:
    return {
        "target": {"path": recipe.target.path, "fingerprint": source.fingerprint, "template": source.template_hash},
        "template_args": recipe.target.template_args,
        "conditions": prepared.report["conditions"],
        "data": {"hash": prepared.report["hash"], "folder": str(prepared.folder.resolve())},
        "vocabulary": prepared.report["vocabulary"],
        "precision": {"step": identity[STEP], "teacher": identity[TEACHER]},
        "init_from": recipe.eagle.init_from,
        "seed": recipe.seed,
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in VERSIONS}},
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"
