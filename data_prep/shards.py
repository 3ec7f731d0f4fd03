"""Answers in shards: each a folder that is whole or absent, under a manifest that says what made them.

A run that was killed leaves whole shards and a manifest behind. The next one makes the missing shards on the same
schedule, so that all of them end as they would have without the kill; whoever comes with another model or another
sampling is refused.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_prep.rows import Rows, joined, write_rows
from recipes.files import read_json, sha256_json, whole_folder, write_json
from recipes.schema import UserError

# how the shards are made, as against what they say: an unfinished run goes on as it began
SCHEDULE = ("rows_a_shard", "slots", "dtype", "device")


def begin(folder: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest to work by: that of the shards which are there, or `wanted`, written down, where there are none.

    Call it under the lock. UserError where the shards were made by another model, sampling or set of prompts.
    """
    for scrap in folder.glob(".shard-*"):
        shutil.rmtree(scrap)  # a shard that a killed process was writing
    path = folder / "manifest.json"
    if not list(folder.glob("shard-*")):
        write_json(path, dict(wanted))
        return dict(wanted)
    there = read_json(path, "the manifest of the answers")
    expected = json.loads(json.dumps(wanted))
    different = [
        f"  {key}: {there.get(key)!r:.200} made the shards, now it is {expected.get(key)!r:.200}"
        for key in sorted({*there, *expected} - {*SCHEDULE})
        if there.get(key) != expected.get(key)
    ]
    if different:
        raise UserError(
            "\n".join([f"{folder} holds answers that cannot be mixed with this run's:", *different])
            + "\nDelete the folder to begin anew, or put back what was changed."
        )
    for key in SCHEDULE:
        if there.get(key) != expected.get(key):
            follows = "the rest may differ from it in the last bits" if key == "device" else "the rest follows"
            print(
                f"data: shards were begun with {key}={there.get(key)}, not {expected.get(key)}: {follows}", flush=True
            )
    return there


def spans(count: int, size: int) -> list[range]:
    """`count` rows in consecutive shards of about equal length, `size` at most."""
    shards = -(-count // size)
    return [range(count * i // shards, count * (i + 1) // shards) for i in range(shards)]


def path_of(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}"


def write_shard(folder: Path, number: int, manifest: Mapping[str, Any], rows: Rows, report: Mapping[str, Any]) -> None:
    with whole_folder(path_of(folder, number)) as aside:
        write_rows(rows, aside / "rows")
        write_json(aside / "report.json", {"manifest": identity(manifest), **report})


def report_of(folder: Path, number: int, manifest: Mapping[str, Any]) -> dict[str, Any]:
    path = path_of(folder, number)
    report = read_json(path / "report.json", "the report of a shard")
    if report.get("manifest") != identity(manifest):
        raise UserError(f"{path} was made under another manifest than {folder}/manifest.json. Delete the shard.")
    return report


def read(folder: Path) -> Rows:
    """The rows of all shards, one after the other."""
    return joined([Rows.load(path_of(folder, n) / "rows") for n in range(len(list(folder.glob("shard-*"))))])


def identity(manifest: Mapping[str, Any]) -> str:
    return sha256_json({k: v for k, v in manifest.items() if k not in SCHEDULE})[:24]
