"""One round's draft tree, drawn: what was drafted, what was grafted from retrieval, and the path that was accepted."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.engine import Clock, Engines, Facts
from eval.tree import RETRIEVAL, DraftTree

if TYPE_CHECKING:
    from eval.harness import Bench

DRAWN = ("eagle", "talon", "prune", "graft")  # their drafts have branches
ROUNDS = 24  # looked at, of which the one that shows most is drawn
DRAFTED, GRAFTED, ACCEPTED = "#4c78a8", "#e4572e", "#2ca02c"


@dataclass(frozen=True)
class Sketch:
    """A tree: each node's text, parent (the root's is itself) and whether retrieval brought it; the nodes of the
    accepted path, root first; and what the target said after it."""

    title: str
    texts: list[str]
    parents: list[int]
    grafted: list[bool]
    accepted: list[int]
    bonus: str


def sketch(bench: "Bench") -> Sketch | None:
    """The most telling of the first rounds of one measured prompt, from a cold matrix: where retrieval was accepted,
    else grafted, else the longest path."""
    drawn = [e for e in bench.entries if e.settings.decoder in DRAWN and bench.outcomes.get(e.label)]
    if not drawn or bench.drafter is None:
        return None
    entry = max(drawn, key=lambda e: e.settings.decoder == "graft")
    ids, target = bench.outcomes[entry.label][0].prompts[0], bench.target
    engine = Engines().get(target, bench.drafter, entry.settings, 1, len(ids))
    first = engine.prefill([ids], [0], None)  # a cold matrix: the carried one has read this answer
    best: tuple[tuple[int, ...], Sketch] | None = None
    clock, said = Clock(target.device), first[-1]
    for number in range(1, min(ROUNDS, entry.settings.max_new_tokens) + 1):
        if said in target.eos_ids:
            break
        facts = engine.round(clock, [False])[0]
        title = f"{entry.settings.decoder}, {bench.outcomes['ar'][0].id}, round {number}"
        found = _sketch(engine.seen, facts, target.tokenizer, title)
        grafts = sum(found.grafted)
        rank = (sum(found.grafted[node] for node in found.accepted), min(grafts, 1) * facts.accepted, facts.accepted)
        best = (rank, found) if best is None or rank > best[0] else best
        said = facts.said[-1]
        if target.eos_ids & set(facts.said):
            break
    return best[1] if best else None


def _sketch(seen: tuple[DraftTree, Any], facts: Facts, tokenizer: Any, title: str) -> Sketch:
    tree, path = seen
    nodes = tree.valid[0].nonzero().flatten().tolist()
    place = {node: k for k, node in enumerate(nodes)}
    return Sketch(
        title=title,
        texts=[tokenizer.decode([token]) for token in tree.tokens[0, nodes].tolist()],
        parents=[place[parent] for parent in tree.parents[0, nodes].tolist()],
        grafted=[source == RETRIEVAL for source in tree.source[0, nodes].tolist()],
        accepted=[place[node] for node in path[0, : 1 + facts.accepted].tolist()],
        bonus=tokenizer.decode(facts.said[-1:]),
    )


def layout(parents: list[int]) -> list[tuple[int, float]]:
    """(depth, height) of each node: leaves lie one below the other, a parent at the middle of its children."""
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], 1):
        children[parent].append(node)
    places = [(0, 0.0)] * len(parents)
    leaves = 0

    def put(node: int, depth: int) -> float:
        nonlocal leaves
        if children[node]:
            heights = [put(child, depth + 1) for child in children[node]]
            height = (heights[0] + heights[-1]) / 2
        else:
            height, leaves = float(leaves), leaves + 1
        places[node] = (depth, height)
        return height

    put(0, 0)
    return places


def draw(found: Sketch, path: Path) -> None:
    """A PNG, whole or not at all."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    places = layout(found.parents)
    deep, tall = max(d for d, _ in places), max(h for _, h in places)
    figure, axes = pyplot.subplots(figsize=(min(16, 3 + 1.6 * deep), min(16, 1.6 + 0.24 * tall)), layout="constrained")
    way = set(found.accepted)
    for node, parent in enumerate(found.parents[1:], 1):
        on = node in way and parent in way
        (x0, y0), (x1, y1) = places[parent], places[node]
        axes.plot([x0, x1], [y0, y1], color=ACCEPTED if on else "#cccccc", linewidth=2.5 if on else 0.8, zorder=1)
    for node, (x, y) in enumerate(places):
        edge = ACCEPTED if node in way else "white"
        colour = "#8c8c8c" if node == 0 else GRAFTED if found.grafted[node] else DRAFTED
        axes.scatter(x, y, s=60, color=colour, edgecolors=edge, linewidths=2, zorder=2)
        axes.text(x + 0.06, y, shown(found.texts[node]), fontsize=7, va="center", zorder=3)
    marks = (("drafter", DRAFTED), ("grafted from retrieval", GRAFTED), ("accepted path", ACCEPTED))
    handles = [Line2D([], [], marker="o", linestyle="", color=colour, label=label) for label, colour in marks]
    axes.legend(handles=handles, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=3)
    axes.set_title(f"{found.title}: {len(found.accepted) - 1} accepted, then {shown(found.bonus)}", fontsize=9)
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.axis("off")
    aside = path.with_name(f".{path.name}")
    figure.savefig(aside, format="png", dpi=130)
    pyplot.close(figure)
    aside.replace(path)


def shown(text: str) -> str:
    """A token as a label: spaces and line ends visible, and nothing that matplotlib would typeset."""
    return repr(text)[1:-1].replace("$", r"\$").replace(" ", "\u2423")[:14]
