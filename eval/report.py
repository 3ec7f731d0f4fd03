"""One page that says what the drafter is worth here: report.md, the picture, and a table on the terminal.

Every sentence here is made of the tables that it stands beside.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval import flex_report, lossless, picture, plots, tunings
from eval.picture import Sketch
from eval.verdict import Table, interval_text, judged, named, times, verdict
from recipes.files import make_folder, write_json, write_text
from recipes.schema import DECODERS

Size = dict[str, Any]
PICTURE, TREE, CALIBRATION = "report.png", "tree.png", "calibration.json"
TAU = (
    "tau = tokens emitted by rounds / rounds, summed over prompts: accepted drafts plus the target's own token; the "
    "token of prefill belongs to no round, and what is cut at the end token or at max_new_tokens does not count. "
    "Drafts a round is the other convention: accepted drafts / rounds, the target's own token left out."
)
CLOCK = (
    "Speed-up = tokens/s over that of `ar`, plain decoding in the same engine and process, decoders interleaved on the "
    "same prompts, warm-up excluded, prefill timed apart. Intervals: 95 %, paired bootstrap over prompts, sums by sums."
)
LOOP = (
    "Loop: an n-gram of up to 32 tokens at least four times in a row, over at least 24 tokens, in any decoder's output."
)
NOT_FREE = (
    "On a CPU verification is not free: each further row of a round costs time, so short drafts and small trees win."
)


def write(
    tables: list[Table],
    tuned: dict[str, Any] | None,
    out: Path,
    sizes: Sequence[Size] = (),
    tree: Sketch | None = None,
    calibration: dict[str, Any] | None = None,
) -> None:
    """results.json (the headline decoder), results-NAME.json for each, pictures, report.md last; each file whole."""
    make_folder(out)
    clear(out)
    for table in tables:
        write_json(out / f"results-{table['decoder']}.json", table)
    if tuned is not None:
        tunings.write_all(out / tunings.FILE, [tuned])
    if sizes:
        write_json(out / "batches.json", {"schema": 1, "sizes": list(sizes)})
    plots.draw(tables, out / PICTURE, sizes)
    if tree is not None:
        picture.draw(tree, out / TREE)
    write_json(out / "results.json", headline(tables))
    more = [flex_report.section(calibration)] if calibration is not None else []
    if more:
        write_json(out / CALIBRATION, calibration)
    write_text(out / "report.md", page(tables, tuned, sizes, tree is not None, *more))


def clear(out: Path) -> None:
    """Take away what an earlier run wrote there: its decoders are not this run's, and half of each is the worth of
    neither. tuned.json stays where it lies beside a drafter."""
    if not (out / "report.md").is_file():
        return
    ours = re.compile(rf"results(-({'|'.join(DECODERS)}|graft-cold|chain-\d+))?\.json")
    beside = (out / "config.json").exists()
    names = {"report.md", "batches.json", CALIBRATION, PICTURE, TREE, "" if beside else tunings.FILE}
    for path in [out / "report.md", *out.iterdir()]:  # the page first: it stands for the whole
        if path.name in names or ours.fullmatch(path.name):
            path.unlink(missing_ok=True)


def headline(tables: list[Table]) -> Table:
    """The decoder that results.json is about: graft where it ran, else the last one timed."""
    return named(tables, "graft") or [table for table in tables if table["settings"]["timed"]][-1]


def page(
    tables: list[Table], tuned: dict[str, Any] | None, sizes: Sequence[Size] = (), tree: bool = False, *more: str
) -> str:
    """report.md."""
    sections = [
        "# What this drafter is worth",
        verdict(tables),
        main_table(tables),
        f"![speed-up, acceptance by position, milliseconds, tau against cost, context, batch]({PICTURE})",
        f"![one round's draft tree: grafted nodes coloured, the accepted path marked]({TREE})" if tree else "",
        "## By batch size\n\n" + batch_table(sizes) if sizes else "",
        "## What brings it\n\n" + "\n".join(f"- {line}" for line in parts(tables)),
        *more,
        "## By category\n\n" + category_table(tables),
        "## Is the output the target's own?\n\n" + "\n".join(f"- {line}" for line in lossless_lines(tables)),
        "## How it was measured\n\n" + "\n".join(f"- {line}" for line in method(tables, tuned)),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def main_table(tables: list[Table]) -> str:
    """One row a decoder: all prompts, and beside each figure the one without flagged loops."""
    rows = [
        "| decoder | draft | tau [95 %] | drafts a round | tau, no loops | tokens/s | speed-up [95 %] "
        "| speed-up, no loops [95 %] | repeated |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for table in tables:
        all_, clean = table["overall"], table["overall"]["loops"]["without"]
        cells = [
            table["decoder"],
            f"{table['shape']}{matrix_text(table)}",
            f"{all_['tau']:.2f}{interval_text(all_['tau_ci95'])}",
            f"{all_['tau_without_bonus']:.2f}",
            number(clean["tau"], clean),
            speed(all_["tokens_per_s"]),
            times(all_),
            times(clean),
            f"{100 * all_['repetition_rate']:.0f} %",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    count, flagged = tables[0]["overall"]["prompts"], tables[0]["overall"]["loops"]["flagged"]
    rows.append(
        f"\n{count} prompts, {flagged} of them flagged as loops (an output that repeats itself). Repeated: 4-grams "
        "that stood in the same output before."
    )
    return "\n".join(rows)


def batch_table(sizes: Sequence[Size]) -> str:
    """A row a batch size: tokens/s of the whole batch, and the speed-up over `ar` at that size."""
    labels = list(dict.fromkeys(label for size in sizes for label in size["decoders"]))
    rows = ["| batch | " + " | ".join(labels) + " | the tuner's choice |", "|---" * (2 + len(labels)) + "|"]
    for size in sizes:
        cells = []
        for label in labels:
            d = size["decoders"].get(label)
            cells.append("-" if d is None else f"{d['tokens_per_s']:.1f}, {d['speedup']:.2f}x (tau {d['tau']:.2f})")
        asked, fits = size["batch_size"], size["fits"]
        name = str(asked) if asked == fits else f"{asked}: out of memory, {fits} fits"
        rows.append(f"| {name} | {' | '.join(cells)} | {size['choice'] or 'not tuned'} |")
    note = "tokens/s of the whole batch, and speed-up over `ar` at that size"
    prompts = f"first turns of {sizes[0]['prompts']} prompts, copied where a batch holds more"
    return "\n".join(rows) + f"\n\n{note}; {prompts}."


def matrix_text(table: Table) -> str:
    state = table["settings"]["matrix"]
    return "" if state == "none" else f", matrix {state}"


def number(value: float, figures: dict[str, Any]) -> str:
    return f"{value:.2f}" if figures["prompts"] else "-"


def speed(value: float | None) -> str:
    return "not timed" if value is None else f"{value:.1f}"


def parts(tables: list[Table]) -> list[str]:
    """What the head alone brings, what retrieval adds at the same budget, and what verification costs."""
    lines = []
    for name, words in (("chain", "The head alone, drafting a chain"), ("eagle", "The head alone, drafting a tree")):
        table = named(tables, name)
        if table is not None:
            f = judged(table)
            lines.append(f"{words} ({table['shape']}): tau {f['tau']:.2f}, {times(f)}.")
    lines += [
        f"For scale, {t['settings']['depth']} drafts in a row: tau {judged(t)['tau']:.2f} (in batches, not timed)."
        for t in tables
        if t["decoder"].startswith("chain-")
    ]
    lines += retrieval(tables) + context_lines(tables)
    lines += [
        f"Gates of {t['decoder']} ({'/'.join(f'{gate:g}' for gate in t['settings']['gates'])}): {source}; rounds that "
        f"each stopped (none: drafted to the end): {shares(judged(t)['stopped_by_gate'], 'at')}."
        for t in tables
        if (source := t["settings"]["gates_from"]) and t["decoder"] != "graft-cold"
    ]
    if tables[0]["environment"]["device"] == "cpu":
        chosen = " Tree size and draft length were chosen by the measured cost curve." if tables[0]["tuned"] else ""
        lines.append(NOT_FREE + chosen)
    return lines


def retrieval(tables: list[Table]) -> list[str]:
    """graft beside what is drafted alone at the same budget, and where graft's accepted drafts came from."""
    graft, cold, flex = named(tables, "graft"), named(tables, "graft-cold"), named(tables, "flex")
    alone = named(tables, "eagle") if flex is None else flex
    if graft is None:
        return []
    f = judged(graft)
    lines = [f"Graft's accepted drafts: {shares(f['accepted_by_source'], 'from')}."]
    if flex is None:
        lines.append(f"Retrieved nodes that the draft already had: {f['merged'] / max(1, f['rounds']):.2f} a round.")
    if flex is None and graft["settings"]["graft_fill"] == "auto":
        lines.append(
            "Places that a gate frees stay empty while retrieval does not pay: ours; the published method is "
            "eval.graft_fill=always."
        )
    shape = ("depth", "branch", "nodes") if flex is None else ("depth",)
    if alone is not None and all(alone["settings"][k] == graft["settings"][k] for k in shape):
        taus = f"tau {f['tau']:.2f} against {judged(alone)['tau']:.2f}"
        lines.append(f"Retrieval at the same budget (graft beside {alone['decoder']}): {taus}.")
    lines += [
        f"{t['decoder']} against {other['decoder']}, the fastest of what is drafted alone: {times(other)}."
        for t in tables
        if (other := t["against"])
    ]
    if cold is not None:
        c = judged(cold)
        warm = f"with {graft['settings']['matrix']}: tau {f['tau']:.2f}, {times(f)}"
        lines.append(f"From a cold matrix: tau {c['tau']:.2f}, {times(c)}; {warm}.")
    return lines


def context_lines(tables: list[Table]) -> list[str]:
    """Whether drafts hold up as the context grows, of the headline decoder."""
    t = headline(tables)
    bins = t["overall"]["acceptance_by_context"]
    if t["decoder"] == "ar" or len(bins) < 2:
        return []
    words = ", ".join(f"{b['from']}: {b['accepted_per_round']:.2f} ({b['rounds']} rounds)" for b in bins)
    return [f"Accepted drafts a round of {t['decoder']} by context length, tokens from: {words}."]


def shares(table: dict[str, int], word: str) -> str:
    """Of their sum, in per cent."""
    total = sum(table.values())
    return ", ".join(f"{100 * n / total:.0f} % {word} {key}" for key, n in sorted(table.items())) if total else "none"


def category_table(tables: list[Table]) -> str:
    """tau (and speed-up where timed) of each decoder by category, loops left out."""
    shown = [t for t in tables if t["decoder"] != "ar"]
    if not shown:
        return ""
    rows = [
        "| category | prompts | loops | " + " | ".join(t["decoder"] for t in shown) + " |",
        "|---" * (3 + len(shown)) + "|",
    ]
    for name in shown[0]["categories"]:
        cells = []
        for table in shown:
            clean = table["categories"][name]["loops"]["without"]
            pace = f", {clean['speedup']:.2f}x" if clean["speedup"] is not None else ""
            cells.append(f"{clean['tau']:.2f}{pace}" if clean["prompts"] else "all loop")
        first = shown[0]["categories"][name]
        label = " ".join(name.split()).replace("|", "/")  # one cell, whatever a prompts file calls it
        rows.append(f"| {label} | {first['prompts']} | {first['loops']['flagged']} | " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n\ntau, and speed-up where timed; flagged loops left out."


def lossless_lines(tables: list[Table]) -> list[str]:
    """The counts of every check that ran, and a loud line for what fails."""
    checks, temperature = tables[0]["checks"], tables[0]["settings"]["temperature"]
    lines = []
    if not checks:
        lines.append("Not checked (eval.lossless=-1).")
    elif temperature > 0:
        lines.append(f"T = {temperature:g}: outputs are samples, so they are not compared token for token.")
    else:
        exact = checks["dtype"] == "float32"
        lines += _count_lines(checks, checks["dtype"], exact)
        if not exact and "float32" in checks:
            lines += _count_lines(checks["float32"], "float32", True)
        if not exact:
            lines.append(
                f"{checks['dtype']} differences are counted the same way, not called lossless: rounding parts them."
            )
    drafted = [t for t in tables if t["decoder"] != "ar"]
    if temperature > 0 or any(t["settings"]["draft_temperature"] > 0 for t in drafted):
        lines += [f"{t['decoder']}: {t['settings']['verification']}." for t in drafted]
    if "speed" in checks:
        lines.append(baseline_line(checks["speed"]))
    return lines + [f"**Not checked, out of memory**: {lossless.CHECKS[name]}." for name in checks.get("no_room", [])]


def baseline_line(speed: dict[str, Any]) -> str:
    """`ar` beside transformers' generate: a slow baseline would flatter every speed-up."""
    ours, theirs = speed["ar_tokens_per_s"], speed["generate_tokens_per_s"]
    word = "at least as fast" if ours >= theirs else "**SLOWER, so the speed-ups here are flattered**"
    pair = f"the baseline `ar` makes {ours:.1f} tokens/s where transformers' generate makes {theirs:.1f}"
    return f"{pair[0].upper()}{pair[1:]} ({speed['prompts']} prompts, prefill included): {word}."


def _count_lines(checks: dict[str, Any], dtype: str, exact: bool) -> list[str]:
    names = {f"{label} against ar": c for label, c in checks.get("decoders", {}).items() if label != "ar"}
    if "generate" in checks:
        names["ar against transformers' generate"] = checks["generate"]
    lines = []
    for name, c in names.items():
        line = f"{name}, {dtype}: {c['checked']} checked, {c['identical']} identical, {c['near_ties']} proven near-ties"
        if c["diverged"]:
            line += (
                f", {len(c['diverged'])} different"
                if not exact
                else f", **{len(c['diverged'])} NOT LOSSLESS**: " + ", ".join(c["diverged"][:8])
            )
        lines.append(line + ".")
        lines += parting_line(name, dtype, c.get("partings", []))
    return lines


def parting_line(name: str, dtype: str, partings: list[dict[str, Any]]) -> list[str]:
    """How near a tie the tokens were where outputs part: a rounding of the dtype, or something else."""
    if not partings:
        return []
    gaps = sorted(p["gap"] / p["step"] for p in partings)
    within = sum(gap <= 2 for gap in gaps)
    exact = sorted(p["exact_gap"] for p in partings if p["exact_gap"] is not None)
    line = f"Where {name} part in {dtype} ({len(gaps)} places): {within} within two steps of {dtype} at the best logit"
    line += f" (median {gaps[len(gaps) // 2]:.1f} steps, most {gaps[-1]:.1f})"
    if exact:
        line += (
            f"; in float64 the two tokens are {exact[len(exact) // 2]:.2g} apart at the median, {exact[-1]:.2g} at most"
        )
    return [line + "."]


def method(tables: list[Table], tuned: dict[str, Any] | None) -> list[str]:
    """Everything that a reader needs to repeat it, or to doubt it."""
    t = headline(tables)
    s, env = t["settings"], t["environment"]
    sampling = f"temperature {s['temperature']:g}, top_p {s['top_p']:g}, top_k {s['top_k']}, seed {s['seed']}"
    versions = f"torch {env['torch']}, transformers {env['transformers']}"
    drafter = t["drafter"] or "of this run"
    lines = [
        f"{env['hardware']} ({env['device']}), {env['threads']} threads, {env['dtype']}, {versions}.",
        f"Target {t['target']['path']}, drafter {drafter}; template arguments {t['target']['template_args']}.",
        f"max_new_tokens {s['max_new_tokens']}, {sampling}, batch {s['batch_size']}.",
        TAU,
        CLOCK,
        LOOP,
    ]
    if tuned:
        lines += tunings.lines(tuned)
    return lines + left_out(t)


def left_out(t: Table) -> list[str]:
    """What was asked for and is not in the figures."""
    lines, long = [], [row for row in t["skipped"] if "limit" in row]
    if t["out_of_memory"]:
        tried = ", ".join(map(str, t["out_of_memory"]))
        lines.append(f"Out of memory at batch {tried}: **measured at {t['settings']['batch_size']}**, which fits.")
    if long:
        names = ", ".join(f"{row['id']} turn {row['turn']} ({row['tokens']} tokens)" for row in long[:12])
        lines.append(f"{len(long)} turns were longer than {long[0]['limit']} tokens and left out: {names}.")
    if len(long) < len(t["skipped"]):
        names = ", ".join(row["id"] for row in t["skipped"] if row not in long)
        lines.append(f"Out of memory even alone, left out: {names}.")
    return lines


def summary(tables: list[Table], out: Path | None) -> None:
    """The table and the verdict, last on the terminal."""
    from rich.console import Console
    from rich.table import Table as RichTable

    sys.stdout.flush()
    console = Console(width=None if sys.stdout.isatty() else 110)
    grid = RichTable(
        title=f"{tables[0]['overall']['prompts']} prompts, max_new_tokens {tables[0]['settings']['max_new_tokens']}"
    )
    for name in ("decoder", "draft", "tau", "no loops", "tokens/s", "speed-up [95 %]", "no loops", "identical"):
        grid.add_column(name, justify="left" if name in ("decoder", "draft") else "right")
    for table in tables:
        all_, clean = table["overall"], table["overall"]["loops"]["without"]
        same = all_["lossless"]
        grid.add_row(
            table["decoder"],
            table["shape"].partition(", top-")[0],
            f"{all_['tau']:.2f}",
            number(clean["tau"], clean),
            speed(all_["tokens_per_s"]),
            times(all_),
            "-" if clean["speedup"] is None else f"{clean['speedup']:.2f}x",
            f"{same['identical']}+{same['near_ties']}/{same['checked']}" if same["checked"] else "-",
        )
    console.print(grid)
    console.print(verdict(tables).replace("**", ""), highlight=False, markup=False)
    if out is not None:
        console.print(f"report: {out / 'report.md'}", highlight=False, markup=False, soft_wrap=True)
