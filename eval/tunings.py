"""tuned.json beside a drafter: what the tuner measured and chose on one machine, an entry a batch size and
temperature."""

import json
from pathlib import Path
from typing import Any

from eval.plan import POLICY, asked, tuned_shapes
from eval.results import environment
from eval.settings import Settings
from models.target import Target
from models.weights import weights_hash
from recipes.files import write_json
from recipes.rules import AT_MOST
from recipes.schema import DECODERS, Recipe, UserError

FILE = "tuned.json"
SCHEMA = 3
KEYS = (
    "measured_on",
    "target",
    "batch_size",
    "temperature",
    "asked",
    "seconds",
    "chosen",
    "speculate",
    "best",
    "table",
    "cost_curve",
)  # of an entry, at least

MOST = 1e12  # of any figure
SURELY = 0.95  # of ar's speed: what two passes can tell from it

Tuning = dict[str, Any]


def check(folder: Path) -> None:
    """Refuse a damaged file before anything is loaded or measured, and say so where one will not be used."""
    path = folder / FILE
    if _entries(path) is None:
        print(f"{path} is set aside: it was written by an older Espalier")


def read(folder: Path, recipe: Recipe, target: Target) -> Tuning | None:
    """The entry of the recipe's batch size and temperature, if it was measured with these very weights, on a machine
    and a target like these; else None, said aloud where there is a file."""
    path, e = folder / FILE, recipe.eval
    try:
        entries, wanted = _entries(path) or {}, _name(e.batch_size, e.temperature)
        tuning = entries.get(wanted)
        if tuning is None:
            if entries:
                print(f"{path} holds nothing for {wanted}, but for {'; '.join(entries)}")
            return None
        then, now = tuning["measured_on"], environment(target)
        same = ["device", "hardware", "dtype", "threads"]
        differs = [f"{key} {then[key]} (now {now[key]})" for key in same if then[key] != now[key]]
        if tuning["target"] != target.fingerprint:
            differs.append(f"target {tuning['target']} (now {target.fingerprint})")
        asked_then, asked_now = tuning["asked"], asked(recipe)
        untuned = [name for name in asked_now.pop("decoders") if name not in ("ar", *asked_then["decoders"])]
        differs += [f"no {' and no '.join(untuned)}"] if untuned else []
        changed = [key for key, value in asked_now.items() if asked_then.get(key) != value]
        differs += [f"eval.{key}={asked_then.get(key)} (now {asked_now[key]})" for key in changed]
        differs += ["other weights of the drafter"] * (tuning.get("drafter") != weights_hash(folder))
    except (KeyError, TypeError, AttributeError) as error:
        raise _foreign(path, error) from error
    if differs:
        print(f"{path} is set aside: measured with {', '.join(differs)}")
        return None
    return dict(tuning)


def write(folder: Path, tuning: Tuning) -> None:
    """Put its entry in, with the drafter's weights named; those of other sizes and temperatures stay."""
    path = folder / FILE
    mine = tuning | {"drafter": weights_hash(folder)}
    write_all(path, [*((_entries(path) or {}) | {_name_of(mine): mine}).values()])


def write_all(path: Path, tunings: list[Tuning]) -> None:
    ordered = sorted(tunings, key=lambda tuning: (tuning["batch_size"], tuning["temperature"]))
    write_json(path, {"schema": SCHEMA, "entries": {_name_of(tuning): tuning for tuning in ordered}})


def _name(batch_size: int, temperature: float) -> str:
    return f"batch {batch_size}, T = {temperature:g}"


def _name_of(tuning: Tuning) -> str:
    return _name(tuning["batch_size"], tuning["temperature"])


def choice(tuning: Tuning) -> str:
    """What to serve with at this batch size; `off` where nothing was surely faster than plain decoding."""
    chosen = tuning["chosen"]
    return f"{chosen['decoder']}, {chosen['shape']}" if chosen["decoder"] != "ar" else "off (nothing surely beats ar)"


def lines(tuned: Tuning) -> list[str]:
    """Of the report: the cost curve and the tuner's choice."""
    curve = tuned["cost_curve"]
    verify = ", ".join(f"{rows} rows {ms:.1f}" for rows, ms in curve["verify_ms_by_rows"].items())
    draft = ", ".join(f"depth {depth} {ms:.1f}" for depth, ms in curve["draft_ms_by_depth"].items())
    chosen = tuned["chosen"]
    plain = next((row for row in tuned["table"] if row["decoder"] == "ar"), None)
    against = f" where ar makes {plain['tokens_per_s']:.1f}" if plain else ""
    predicted = f"{chosen['decoder']}, {chosen['shape']} (predicted {chosen['tokens_per_s']:.1f} tokens/s{against})"
    told = [
        f"Settings were chosen in {tuned['seconds']:.0f} s by the measured cost curve, on validation prompts that no "
        f"figure here uses. Verification, ms: {verify}. Drafting, ms: {draft}.",
        f"The tuner's own choice: {predicted}.",
    ]
    if "shortfall" in tuned:
        below = f"{100 * tuned['shortfall']:.1f} % below the best"
        told.append(f"On the measured grid of {len(tuned['grid'])} settings that choice is {below}.")
    return told + context_lines(tuned)


def context_lines(tuning: Tuning) -> list[str]:
    """Of eval.contexts, where it was measured: a line a context, and from where on the choice loses to `ar`."""
    told, chosen, loses = [], tuning["chosen"]["decoder"], list[int]()
    for row in tuning.get("contexts", []):
        speeds, context = row["tokens_per_s"], int(row["context"])
        costs = ", ".join(f"{name} {ms:.2f}" for name, ms in row["ms_per_round"].items())
        shares = ", ".join(f"{name} {speed / speeds['ar']:.2f} x" for name, speed in speeds.items() if name != "ar")
        predicted = f"; predicted: {shares} ar" if shares else ""
        told.append(f"At {context:,} tokens of context, ms a round: {costs}{predicted}")
        loses += [context] if chosen in speeds and speeds[chosen] < SURELY * speeds["ar"] else []
    if loses:
        told.append(f"{chosen} was chosen on shorter prompts: at {loses[0]:,} tokens plain decoding is faster")
    return [f"{line}." for line in told]


def of_grid(grid: list[dict[str, Any]], chosen: dict[str, Any]) -> dict[str, Any]:
    """The row of a measured grid that has the chosen setting."""
    keys = ("decoder", "depth", "branch", "nodes", "gates", "parallel", *POLICY)
    mine = next((row for row in grid if all(row[key] == chosen[key] for key in keys)), None)
    if mine is None:
        raise ValueError(f"{chosen['decoder']} ({chosen['shape']}) is not in the grid")
    return mine


def grid_lines(tuning: Tuning) -> list[str]:
    """The measured grid, each setting beside plain decoding, and last the choice: why to speculate, or why not."""
    grid, lines = tuning["grid"], []
    plain = next(row["tokens_per_s"] for row in grid if row["decoder"] == "ar")
    for row in grid:
        figures = f"tau {row['tau']:.2f}  {row['ms_per_round']:7.2f} ms  {row['tokens_per_s']:7.1f} tokens/s"
        lines.append(f"{row['decoder']:6} {row['shape']:50} {figures}  {row['tokens_per_s'] / plain:.2f} x ar")
    share = of_grid(grid, tuning["chosen"])["tokens_per_s"] / plain
    below = f"{100 * tuning['shortfall']:.1f} % below the best of the grid, {share:.2f} x ar"
    return [*lines, f"batch {tuning['batch_size']}: {choice(tuning)}; {below}"]


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


def _entries(path: Path) -> dict[str, Tuning] | None:
    """Entries by name; nothing where there is no file, None for one of an older Espalier, whose form is measured
    anew."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["schema"] < SCHEMA:
            return None
        for name, tuning in found["entries"].items():
            _check_entry(name, tuning)
        return dict(found["entries"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, ArithmeticError) as error:
        raise _foreign(path, error) from error


def _check_entry(entry: str, tuning: Tuning) -> None:
    """Raise a ValueError, KeyError or TypeError where something is missing that decoders or reports read."""
    missing = [key for key in KEYS if key not in tuning]
    if missing or _name_of(tuning) != entry:
        raise ValueError(f"{entry}: {', '.join(missing) or 'its name'} is missing or wrong")
    for row in tuning.get("contexts", []):
        tables = row["ms_per_round"], row["tokens_per_s"]
        figures = [row["context"], *(figure for table in tables for figure in table.values())]
        if not all(type(figure) in (int, float) and 0 < figure < MOST for figure in figures):
            raise ValueError(f"{entry}: contexts hold what is no time and no speed")
        if not all("ar" in table and set(table) <= set(DECODERS) for table in tables):
            raise ValueError(f"{entry}: contexts name other decoders")
    lines(tuning)  # raises where the report would, hours later
    if not all(key in tuning["measured_on"] for key in ("device", "hardware", "dtype", "threads")):
        raise ValueError(f"{entry}: measured_on is not whole")
    if not isinstance(tuning["asked"], dict):
        raise ValueError(f"{entry}: asked is no table")
    for name, changes in tuned_shapes(tuning, DECODERS).items():
        settings = Settings(name, **changes)
        if not (settings.gates and all(type(gate) in (int, float) for gate in settings.gates)):
            raise ValueError(f"{entry}: gates of {name} are no numbers")
        whole = (settings.depth, settings.branch, settings.nodes, settings.paths)
        if name not in DECODERS or not all(isinstance(n, int) and 0 < n <= AT_MOST["nodes"] for n in whole):
            raise ValueError(f"{entry}: {name} has no such settings")


def _foreign(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} is not a tuned.json of ours ({error!r}). Delete it; eval.tune=true measures again")
