"""The report's picture: speed-up, acceptance by position and by context, what a round costs and brings, batch sizes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.outcome import STAGES

COLOURS = {
    "ar": "#8c8c8c",
    "chain": "#4c78a8",
    "eagle": "#54a24b",
    "graft": "#e4572e",
    "talon": "#72b7b2",
    "prune": "#b279a2",
    "recycle": "#f2b134",
    "lookup": "#9d755d",
    "suffix": "#d67195",
    "splice": "#7a3b69",
    "flex": "#1f6f8b",
}
STAGE_COLOURS = dict(zip(STAGES, ("#4c78a8", "#f2b134", "#54a24b", "#b279a2", "#9d755d"), strict=True))


def draw(tables: list[dict[str, Any]], path: Path, sizes: Sequence[dict[str, Any]] = ()) -> None:
    """Six panels in one PNG, the last one only with a sweep over batch sizes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, ((first, second, third), (fourth, fifth, sixth)) = pyplot.subplots(
        2, 3, figsize=(14, 8), layout="constrained"
    )
    speedups(first, tables)
    positions(second, tables)
    milliseconds(third, tables)
    pareto(fourth, tables)
    contexts(fifth, tables)
    batches(sixth, sizes)
    aside = path.with_name(f".{path.name}")
    figure.savefig(aside, format="png", dpi=130)
    pyplot.close(figure)
    aside.replace(path)


def speedups(axes: Any, tables: list[dict[str, Any]]) -> None:
    """Bars of speed-up over `ar` with 95 % intervals; without loops as a hollow marker."""
    timed = [t for t in tables if t["overall"]["speedup"] is not None]
    for place, table in enumerate(timed):
        overall = table["overall"]
        value, interval = overall["speedup"], overall["speedup_ci95"]
        axes.bar(place, value, color=colour(table["decoder"]), width=0.65)
        if interval:
            axes.errorbar(
                place,
                value,
                yerr=[[max(0, value - interval[0])], [max(0, interval[1] - value)]],
                color="black",
                capsize=4,
            )
        clean = overall["loops"]["without"]["speedup"]
        if clean is not None and overall["loops"]["flagged"]:
            axes.plot(place + 0.2, clean, "D", markerfacecolor="white", markeredgecolor="black", markersize=6)
        axes.text(place, 0.03, f"{value:.2f}x", ha="center", color="white")
    axes.axhline(1.0, color="black", linewidth=1, linestyle="--")
    axes.set_xticks(range(len(timed)), [t["decoder"] for t in timed])
    axes.set_title("speed-up over ar (95 % interval; diamond: without loops)", fontsize=10)


def positions(axes: Any, tables: list[dict[str, Any]]) -> None:
    """Share of rounds whose k-th draft was accepted, of those that drafted one."""
    for table in tables:
        shares = table["overall"]["acceptance_by_position"]
        if shares:
            axes.plot(
                range(1, len(shares) + 1),
                shares,
                style(table["decoder"]),
                marker="o",
                color=colour(table["decoder"]),
                label=table["decoder"],
            )
    if axes.lines:
        axes.legend(fontsize=8)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("draft position")
    axes.set_title("accepted, of the rounds that drafted this far", fontsize=10)


def milliseconds(axes: Any, tables: list[dict[str, Any]]) -> None:
    """A stacked bar a decoder: the stages of a round, and what the clock saw besides."""
    timed = [t for t in tables if t["overall"]["ms_per_round"]]
    for place, table in enumerate(timed):
        base = 0.0
        stages = table["overall"]["ms_per_round"]
        rest = max(0.0, table["overall"]["ms_per_round_total"] - sum(stages.values()))
        for name, value in [*stages.items(), ("other", rest)]:
            shown = name if place == 0 else None
            axes.barh(place, value, left=base, color=STAGE_COLOURS.get(name, "#cccccc"), label=shown)
            base += value
    axes.set_yticks(range(len(timed)), [t["decoder"] for t in timed])
    axes.invert_yaxis()
    if timed:
        axes.legend(fontsize=8, ncols=6, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    axes.set_title("where a round's milliseconds (x axis) go", fontsize=10)


def pareto(axes: Any, tables: list[dict[str, Any]]) -> None:
    """tau against the milliseconds of a round. On a line through the origin speed is equal; that of `ar` is drawn."""
    timed = [t["overall"] | {"name": t["decoder"]} for t in tables if t["overall"]["ms_per_round_total"]]
    for f in timed:
        axes.plot(f["ms_per_round_total"], f["tau"], "o", color=colour(f["name"]), markersize=8)
        axes.annotate(
            f["name"], (f["ms_per_round_total"], f["tau"]), xytext=(6, 4), textcoords="offset points", fontsize=8
        )
    for f in front(timed):
        axes.plot(
            f["ms_per_round_total"], f["tau"], "o", markerfacecolor="none", markeredgecolor="black", markersize=13
        )
    base = next((f for f in timed if f["name"] == "ar"), None)
    if base is not None:
        far = max(f["ms_per_round_total"] for f in timed)
        axes.plot([0, far], [0, far * base["tau"] / base["ms_per_round_total"]], "--", color="black", linewidth=1)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("ms a round")
    axes.set_title("tau against cost (ringed: unbeaten; dashed: as fast as ar)", fontsize=10)


def front(figures: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that no other beats in tau at the same or a lower cost of a round."""

    def beaten(f: dict[str, Any], by: dict[str, Any]) -> bool:
        less, more = by["ms_per_round_total"] - f["ms_per_round_total"], by["tau"] - f["tau"]
        return less <= 0 <= more and (less, more) != (0, 0)

    return [f for f in figures if not any(beaten(f, other) for other in figures)]


def contexts(axes: Any, tables: list[dict[str, Any]]) -> None:
    """Accepted drafts a round by the length of the context."""
    for table in tables:
        bins = table["overall"]["acceptance_by_context"]
        if bins and table["decoder"] != "ar":
            starts, values = [b["from"] for b in bins], [b["accepted_per_round"] for b in bins]
            name = table["decoder"]
            axes.plot(starts, values, style(name), marker="o", color=colour(name), label=name)
    if axes.lines:
        axes.legend(fontsize=8)
        axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("context, tokens from")
    axes.set_title("accepted drafts a round by context length", fontsize=10)


def batches(axes: Any, sizes: Sequence[dict[str, Any]]) -> None:
    """Speed-up over `ar` at each batch size."""
    if not sizes:
        axes.axis("off")
        return
    for label in dict.fromkeys(label for size in sizes for label in size["decoders"]):
        points = [(s["fits"], s["decoders"][label]["speedup"]) for s in sizes if label in s["decoders"]]
        axes.plot(*zip(*points, strict=True), style(label), marker="o", color=colour(label), label=label)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    axes.set_xlabel("batch size")
    axes.set_title("speed-up over ar at each batch size", fontsize=10)


def style(decoder: str) -> str:
    """Dashes for a second row of one decoder, such as graft's from a cold matrix."""
    return "-" if decoder in COLOURS else "--"


def colour(decoder: str) -> str:
    return COLOURS.get(decoder.partition("-")[0], "#333333")
