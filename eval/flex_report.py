"""What a FlexDraft's calibrator brings: the same prompts decoded without and with it, and how far drafts hold by
position, behind each number of drafts accepted in the round before, which is what their group of masks assumed.
"""

from collections import Counter
from typing import TYPE_CHECKING, Any

from eval import stats
from eval.decode import Decoded, RowResult
from eval.memory import by_halving
from eval.outcome import row_id
from eval.plan import settings_of
from models.flexdraft import FlexDraft

if TYPE_CHECKING:
    from eval.harness import Bench

LABELS = ("without", "with")
PROMPT = -1  # no round before: the group behind the prompt


def calibration(bench: "Bench", slots: int) -> dict[str, Any] | None:
    """First turns of the measured prompts, looping ones left out, all drafts of each round verified; None where there
    is no calibrator. The target's draws are the same in both, and so are the texts."""
    drafter = bench.drafter
    if not isinstance(drafter, FlexDraft) or drafter.calibrator is None:
        return None
    prompts = [(o.id, o.prompts[0]) for o in bench.outcomes["ar"] if not o.loop and o.prompts]
    if not prompts:
        return None
    settings = settings_of("flex", bench.recipe.eval, gates=(0.0,), parallel=False)
    ids, names = [ids for _, ids in prompts], [row_id(name, 0) for name, _ in prompts]
    found: dict[str, list[RowResult]] = {}
    for label, one in (("without", drafter.uncalibrated()), ("with", drafter)):

        def run(rows: int, one: FlexDraft = one) -> Decoded:
            return bench.decode(bench.target, one, ids, settings, matrix=None, row_ids=names, slots=rows)

        found[label] = by_halving(slots, run).rows
    emitted, rounds = (
        {label: [float(getattr(row, key)) for row in rows] for label, rows in found.items()}
        for key in ("emitted", "rounds")
    )
    pairs = emitted["without"], rounds["without"], emitted["with"], rounds["with"]
    interval = stats.difference_interval(*pairs, seed=bench.recipe.eval.seed)
    return {
        "prompts": len(prompts),
        "settings": {"depth": settings.depth, "temperature": settings.temperature},
        "tau_gain": stats.ratio(*pairs[2:]) - stats.ratio(*pairs[:2]),
        "tau_gain_ci95": list(interval) if interval else None,
        **{label: figures(rows) for label, rows in found.items()},
    }


def figures(rows: list[RowResult]) -> dict[str, Any]:
    """tau, and acceptance by position (of the rounds that drafted it, the share whose draft there was accepted), of
    all rounds and by the number accepted in the one before. A row's last, which may be cut, counts for tau alone."""
    groups: dict[int, list[tuple[int, int]]] = {}
    for row in rows:
        before = [PROMPT, *row.accepted_per_round]
        whole = zip(before, row.accepted_per_round[:-1], row.drafted_depth_per_round, strict=False)
        for assumed, accepted, drafted in whole:
            groups.setdefault(assumed, []).append((accepted, drafted))
    return {
        "tau": stats.ratio([float(row.emitted) for row in rows], [float(row.rounds) for row in rows]),
        "acceptance_by_position": by_position([one for group in groups.values() for one in group]),
        "by_accepted_before": [
            {"accepted_before": m, "rounds": len(group), "acceptance_by_position": by_position(group)}
            for m, group in sorted(groups.items())
        ],
    }


def by_position(rounds: list[tuple[int, int]]) -> list[float]:
    """Of (accepted, drafted) drafts of rounds; position 1 first."""
    offered, kept = Counter[int](), Counter[int]()
    for accepted, drafted in rounds:
        offered.update(range(drafted))
        kept.update(range(accepted))
    return [kept[j] / offered[j] for j in sorted(offered)]


def section(found: dict[str, Any]) -> str:
    """Of report.md."""
    low_high = found["tau_gain_ci95"]
    interval = "" if low_high is None else f" (95 % paired interval {low_high[0]:+.3f} to {low_high[1]:+.3f})"
    without, calibrated = found["without"], found["with"]
    text = (
        f"tau {without['tau']:.3f} without the calibrator, {calibrated['tau']:.3f} with it: {found['tau_gain']:+.3f}"
        f"{interval}; first turns of {found['prompts']} prompts, all {found['settings']['depth']} drafts verified."
    )
    rows = ["| drafts accepted before | calibrator | rounds | share accepted, by position |", "|---" * 4 + "|"]
    tables = {label: {m["accepted_before"]: m for m in found[label]["by_accepted_before"]} for label in LABELS}
    for m in sorted({*tables["without"], *tables["with"]}):
        for label in LABELS:
            if m in tables[label]:
                shares = " ".join(f"{share:.2f}" for share in tables[label][m]["acceptance_by_position"])
                name = "none: after the prompt" if m == PROMPT else str(m)
                rows.append(f"| {name} | {label} | {tables[label][m]['rounds']} | {shares} |")
    for label in LABELS:
        shares = " ".join(f"{share:.2f}" for share in found[label]["acceptance_by_position"])
        rows.append(f"| all | {label} |  | {shares} |")
    return "\n\n".join(["## What the calibrator brings", text, "\n".join(rows)])
