"""tuned.json beside a drafter: what the tuner measured and chose on one machine, an entry a batch size."""

import json
from pathlib import Path
from typing import Any

from eval.plan import asked
from eval.results import environment
from models.target import Target
from recipes.files import write_json
from recipes.schema import Recipe, UserError

FILE = "tuned.json"
SCHEMA = 2

Tuning = dict[str, Any]


def read(folder: Path, recipe: Recipe, target: Target) -> Tuning | None:
    """The entry of the recipe's batch size, if it was measured on a machine and a target like these; else None, said
    aloud where there is one."""
    path = folder / FILE
    try:
        tuning = _entries(path).get(str(recipe.eval.batch_size))
        if tuning is None:
            return None
        then, now = tuning["measured_on"], environment(target)
        same = ["device", "hardware", "dtype", "threads"]
        differs = [f"{key} {then[key]} (now {now[key]})" for key in same if then[key] != now[key]]
        wanted = {"temperature": recipe.eval.temperature, "target": target.fingerprint, "asked": asked(recipe)}
        differs += [f"{key} {tuning[key]} (now {value})" for key, value in wanted.items() if tuning[key] != value]
    except (KeyError, TypeError, AttributeError) as error:
        raise _foreign(path, error) from error
    if differs:
        print(f"{path} is set aside: measured with {', '.join(differs)}")
        return None
    return dict(tuning)


def write(folder: Path, tuning: Tuning) -> None:
    """Put the entry of its batch size in; those of other sizes stay."""
    path = folder / FILE
    batches = _entries(path) | {str(tuning["batch_size"]): tuning}
    write_all(path, list(batches.values()))


def write_all(path: Path, tunings: list[Tuning]) -> None:
    ordered = sorted(tunings, key=lambda tuning: int(tuning["batch_size"]))
    write_json(path, {"schema": SCHEMA, "batches": {str(tuning["batch_size"]): tuning for tuning in ordered}})


def choice(tuning: Tuning) -> str:
    """What to serve with at this batch size; `off` where nothing was faster than plain decoding."""
    chosen = tuning["chosen"]
    return f"{chosen['decoder']}, {chosen['shape']}" if chosen["decoder"] != "ar" else "off (nothing beats ar)"


def crossover(found: list[Tuning]) -> list[str]:
    """Of `flex` in each mode, the best of the measured grid at each batch size, in tokens/s: where one overtakes the
    other is the crossover, and where `ar` is above both there is nothing to choose."""
    lines = []
    for tuning in found:
        speeds = {"ar": 0.0, "sequential": 0.0, "parallel": 0.0}
        for row in tuning["grid"]:
            mode = ("parallel" if row["parallel"] else "sequential") if row["decoder"] == "flex" else row["decoder"]
            if mode in speeds:
                speeds[mode] = max(speeds[mode], row["tokens_per_s"])
        figures = ", ".join(f"{mode} {speed:.1f}" for mode, speed in speeds.items() if speed)
        best = max(speeds, key=lambda mode: speeds[mode])
        lines.append(f"flex at batch {tuning['batch_size']}: {'off' if best == 'ar' else best} ({figures} tokens/s)")
    return lines


def _entries(path: Path) -> dict[str, Tuning]:
    """{batch size: entry}; nothing where there is no file, or one of an older Espalier, whose form is measured anew."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text())
        if found["schema"] < SCHEMA:
            print(f"{path} is set aside: it was written by an older Espalier")
            return {}
        return dict(found["batches"])
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
        raise _foreign(path, error) from error


def _foreign(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} is not a tuned.json of ours ({error}). Delete it; eval.tune=true measures again")
