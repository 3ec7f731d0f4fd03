"""The verdict in words, computed from the table so that it can say no more than the table does.

The interval of the speed-up lies above 1 (it pays), below 1 (it does not), or around it (not shown either way). Over
fewer than six timings (prompts, or batches where several are decoded together) it shows nothing: where speculation
changes nothing, two lie on one side of 1 every second time, and a bootstrap of them cannot know; six do once in
thirty-two.
"""

from typing import Any

from models.card import FEWEST

Table = dict[str, Any]


def named(tables: list[Table], decoder: str) -> Table | None:
    return next((table for table in tables if table["decoder"] == decoder), None)


def judged(table: Table) -> dict[str, Any]:
    """The figures that the verdict rests on: without flagged loops, unless everything looped."""
    overall: dict[str, Any] = table["overall"]
    without: dict[str, Any] = overall["loops"]["without"]
    return without if without["prompts"] else overall


def best(tables: list[Table]) -> Table | None:
    """The fastest decoder that is shown to pay; where none is, the fastest that speculates at all."""
    timed = [t for t in tables if t["decoder"] not in ("ar", "graft-cold") and judged(t)["speedup"] is not None]
    paying = [t for t in timed if outcome(judged(t)) == "pays"]
    return max(paying or timed, key=lambda table: float(judged(table)["speedup"]), default=None)


def outcome(figures: dict[str, Any]) -> str:
    """pays | does not pay | uncertain, by where the interval of the speed-up lies."""
    interval = figures["speedup_ci95"]
    if interval is None or figures["clocks"] < FEWEST:
        return "uncertain"
    if interval[0] > 1:
        return "pays"
    return "does not pay" if interval[1] < 1 else "uncertain"


def verdict(tables: list[Table]) -> str:
    """What to serve with, what it gains here, or that it does not pay; true to the table."""
    winner = best(tables)
    where = place(tables[0])
    if winner is None:
        return f"Nothing but plain decoding was measured {where}, so there is no gain to report."
    figures, flagged = judged(winner), winner["overall"]["loops"]["flagged"]
    name = f"**{winner['decoder']}** ({winner['shape']})"
    gain = f"{times(figures)} plain decoding, tau {figures['tau']:.2f}"
    basis = f"over {figures['prompts']} prompts{', flagged loops left out' if flagged else ''}"
    few = figures["speedup_ci95"] is None or figures["clocks"] < FEWEST
    batches = f" in {figures['clocks']} batches" * (figures["clocks"] < figures["prompts"])
    doubt = f"which{batches} are too few to tell" if few else "and that interval holds 1"
    text = {
        "pays": f"It pays. Serve with {name}: {gain}, {basis}, {where}.",
        "does not pay": f"It does not pay {where}: the best setting tried, {name}, reaches {gain}, {basis}. "
        "Serve without speculation.",
        "uncertain": f"Not shown to pay {where}: the best setting tried, {name}, reaches {gain}, {basis}, {doubt}. "
        "Serve without speculation, or measure more prompts.",
    }[outcome(figures)]
    if flagged and outcome(winner["overall"]) != outcome(figures):
        text += f" With the looping prompts included it reads {times(winner['overall'])}."
    return text + _cold_line(tables, winner) + _chain_line(tables, winner)


def _cold_line(tables: list[Table], winner: Table) -> str:
    """Graft from a cold matrix is a control, no setting of its own; where it reads otherwise, that is said."""
    cold = named(tables, "graft-cold")
    if winner["decoder"] != "graft" or cold is None or outcome(judged(cold)) == outcome(judged(winner)):
        return ""
    return f" The control, graft from a cold matrix for every prompt, reads {times(judged(cold))}."


def _chain_line(tables: list[Table], winner: Table) -> str:
    """Engines that serve chains alone want the chain's own answer; several paths a round are a tree to them."""
    chain = named(tables, "chain")
    if chain is None or chain is winner or judged(chain)["speedup"] is None or chain["settings"]["paths"] > 1:
        return ""
    figures = judged(chain)
    words = {"pays": "pays too", "does not pay": "does not pay", "uncertain": "is not shown to pay"}
    length = f"{'best ' if chain['tuned'] else ''}draft length tried is {chain['settings']['depth']}"
    return f" In an engine that serves chains alone the {length}, which {words[outcome(figures)]}: {times(figures)}."


def place(table: Table) -> str:
    """Machine and settings in half a sentence."""
    env, settings = table["environment"], table["settings"]
    threads = f", {env['threads']} threads" if env["device"] == "cpu" else ""
    how = f"batch {settings['batch_size']}, T = {settings['temperature']:g}"
    return f"on {env['hardware']}{threads}, {env['dtype']}, {how}"


def interval_text(interval: list[float] | None) -> str:
    return f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else ""


def times(figures: dict[str, Any]) -> str:
    if figures["speedup"] is None:
        return "-"
    return f"{figures['speedup']:.2f}x{interval_text(figures['speedup_ci95'])}"
