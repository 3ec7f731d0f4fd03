"""The report's picture: speed-up with intervals, acceptance by position, and where a round's milliseconds go."""

from pathlib import Path
from typing import Any

from eval.outcome import STAGES

COLOURS = {"ar": "#8c8c8c", "chain": "#4c78a8", "eagle": "#54a24b", "graft": "#e4572e"}
STAGE_COLOURS = dict(zip(STAGES, ("#4c78a8", "#f2b134", "#54a24b", "#b279a2", "#9d755d"), strict=True))


def draw(tables: list[dict[str, Any]], path: Path) -> None:
    """Three panels side by side in one PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(14, 4), layout="constrained")
    speedups(left, tables)
    positions(middle, tables)
    milliseconds(right, tables)
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
            style = "--" if table["decoder"] not in COLOURS else "-"
            axes.plot(
                range(1, len(shares) + 1),
                shares,
                style,
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


def colour(decoder: str) -> str:
    return COLOURS.get(decoder.partition("-")[0], "#333333")
