"""From outcomes to results.json (schema 1): ratios of sums, with and without the prompts flagged as loops."""

import platform
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from eval import stats
from eval.outcome import STAGES, Outcome, repetition
from eval.plan import Entry, describe, settings_record
from models.target import Target

if TYPE_CHECKING:
    from eval.harness import Bench

K = TypeVar("K", int, str)
Pairs = list[tuple[Outcome, Outcome]]  # (this decoder, `ar`) on the same prompt
RETRIEVE = ("graft", "splice")  # decoders that do, and that do not
DRAFT_ALONE = ("chain", "eagle", "prune", "talon", "flex")


def build(
    bench: "Bench", checks: dict[str, Any], tuned: dict[str, Any] | None, drafter_name: str
) -> list[dict[str, Any]]:
    """One results.json dict an entry, in the order of the plan."""
    about = environment(bench.target)
    return [
        {
            "schema": 1,
            "target": {
                "path": bench.recipe.target.path,
                "fingerprint": bench.target.fingerprint,
                "template_args": dict(bench.recipe.target.template_args),
            },
            "drafter": drafter_name,
            "decoder": entry.label,
            "shape": describe(entry.settings),
            "settings": settings_record(entry, bench.size),
            "environment": about,
            **_tables(bench, entry),
            "skipped": bench.skipped,
            "out_of_memory": bench.no_room,  # batch sizes
            "checks": checks,
            "tuned": tuned is not None,
        }
        for entry in bench.entries
    ]


def _tables(bench: "Bench", entry: Entry) -> dict[str, Any]:
    """`overall`, `categories` and `per_prompt` of one entry."""
    base = {o.id: o for o in bench.outcomes["ar"]}
    pairs = [(o, base[o.id]) for o in bench.outcomes[entry.label]]
    seed = bench.recipe.eval.seed
    names = list(dict.fromkeys(o.category for o, _ in pairs))
    return {
        "overall": with_loops(pairs, entry.timed, seed),
        "categories": {
            name: with_loops([(o, b) for o, b in pairs if o.category == name], entry.timed, seed) for name in names
        },
        "per_prompt": [per_prompt(o, b, entry.timed, bench.target) for o, b in pairs],
        "against": _against(bench, entry),
    }


def _against(bench: "Bench", entry: Entry) -> dict[str, Any] | None:
    """What retrieval is worth: a decoder that retrieves beside the fastest that drafts alone, flagged loops
    left out; None where there is nothing to compare."""
    rows = [o for o in bench.outcomes[entry.label] if not o.loop]
    others = {e.label: {o.id: o for o in bench.outcomes[e.label]} for e in bench.entries if e.timed}
    speeds = {
        name: _speeds(rows, [others[name][o.id] for o in rows], True, bench.recipe.eval.seed)
        for name in DRAFT_ALONE
        if name in others and entry.timed and entry.settings.decoder in RETRIEVE and rows
    }
    if not speeds:
        return None
    fastest = min(speeds, key=lambda name: float(speeds[name]["speedup"]))
    return {"decoder": fastest, **{k: speeds[fastest][k] for k in ("speedup", "speedup_ci95")}}


def with_loops(pairs: Pairs, timed: bool, seed: int) -> dict[str, Any]:
    """The figures over all prompts, and again without those flagged as loops."""
    clean = [(o, b) for o, b in pairs if not o.loop]
    loops = {"flagged": len(pairs) - len(clean), "without": figures(clean, timed, seed)}
    return {**figures(pairs, timed, seed), "loops": loops}


def figures(pairs: Pairs, timed: bool = True, seed: int = 0) -> dict[str, Any]:
    """The fields of the schema over some prompts. Speeds are null where the decoder was not timed."""
    rows, base = [o for o, _ in pairs], [b for _, b in pairs]
    emitted, rounds, accepted = _column(rows, "emitted"), _column(rows, "rounds"), _column(rows, "accepted")
    stops = _total(o.stops for o in rows)
    table = {
        "prompts": len(rows),
        "clocks": len({o.batch for o in rows}),  # timed apart: batches
        "tokens": sum(o.tokens for o in rows),
        "rounds": sum(o.rounds for o in rows),
        "tau": stats.ratio(emitted, rounds),
        "tau_ci95": _interval(stats.ratio_interval(emitted, rounds, seed)),
        "tau_without_bonus": stats.ratio(accepted, rounds),
        "acceptance_by_position": acceptance(rows),
        "acceptance_by_context": by_context(rows),
        "repetition_rate": repetition_rate(rows),
        "accepted_by_source": _total(o.sources for o in rows),
        "merged": sum(o.merged for o in rows),
        "stopped_by_gate": stops,
        **_speeds(rows, base, timed, seed),
        "lossless": {
            "checked": sum(o.verdict != "" for o in rows),
            "identical": sum(o.verdict == "identical" for o in rows),
            "near_ties": sum(o.verdict == "near_tie" for o in rows),
        },
        "ms_per_round": None,
        "ms_per_round_total": None,
    }
    batch_rounds = sum(o.batch_rounds for o in rows)
    if timed and batch_rounds:
        per = 1000 / batch_rounds
        table["ms_per_round"] = {stage: per * sum(o.stage_seconds[stage] for o in rows) for stage in STAGES}
        table["ms_per_round_total"] = per * sum(o.seconds for o in rows)
    return table


def _speeds(rows: Sequence[Outcome], base: Sequence[Outcome], timed: bool, seed: int) -> dict[str, Any]:
    """Tokens/s of decoding (prefill apart) beside the baseline's; the interval resamples batches, one clock each."""
    tokens, seconds = _column(rows, "emitted"), _column(rows, "seconds")
    base_tokens, base_seconds = _column(base, "emitted"), _column(base, "seconds")
    baseline = stats.ratio(base_tokens, base_seconds)
    speed = stats.ratio(tokens, seconds)
    if not timed or not rows:
        return {
            "tokens_per_s": None,
            "baseline_tokens_per_s": baseline,
            "speedup": None,
            "speedup_ci95": None,
            "prefill_s": None,
        }
    batches = [o.batch for o in rows]
    columns = [stats.grouped(column, batches) for column in (tokens, seconds, base_tokens, base_seconds)]
    return {
        "tokens_per_s": speed,
        "baseline_tokens_per_s": baseline,
        "speedup": speed / baseline if baseline else 0.0,
        "speedup_ci95": _interval(stats.speedup_interval(columns[0], columns[1], columns[2], columns[3], seed)),
        "prefill_s": sum(o.prefill_seconds for o in rows),
    }


def acceptance(rows: Sequence[Outcome]) -> list[float]:
    """Of the rounds that drafted a k-th position, the share whose k-th draft was accepted; k from 1."""
    offered, accepted = _total(o.offered for o in rows), _total(o.accepted_at for o in rows)
    return [accepted.get(k, 0) / offered[k] for k in sorted(offered) if offered[k]]


def by_context(rows: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Accepted drafts a round, by the context length at which rounds began: from a power of two up to the next."""
    rounds, accepted = _total(o.context_rounds for o in rows), _total(o.context_accepted for o in rows)
    return [
        {"from": start, "rounds": rounds[start], "accepted_per_round": accepted[start] / rounds[start]}
        for start in sorted(rounds)
    ]


def repetition_rate(rows: Sequence[Outcome]) -> float:
    """Share of the outputs' 4-grams that stood in the same output before."""
    pairs = [repetition(o.outputs) for o in rows]
    return stats.ratio([float(r) for r, _ in pairs], [float(t) for _, t in pairs])


def per_prompt(outcome: Outcome, base: Outcome, timed: bool, target: Target) -> dict[str, Any]:
    """One prompt's own line, with its text, so that a reader can see what was decoded."""
    return {
        "id": outcome.id,
        "category": outcome.category,
        "turns": len(outcome.outputs),
        "prompt_tokens": [len(ids) for ids in outcome.prompts],
        "tokens": outcome.tokens,
        "rounds": outcome.rounds,
        "emitted": outcome.emitted,
        "accepted": outcome.accepted,
        "tau": outcome.emitted / outcome.rounds if outcome.rounds else None,
        "seconds": outcome.seconds if timed else None,
        "baseline_seconds": base.seconds,
        "baseline_emitted": base.emitted,
        "loop": outcome.loop,
        "lossless": outcome.verdict or None,
        "answers": [target.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in outcome.outputs],
    }


def environment(target: Target) -> dict[str, Any]:
    """Where these numbers come from: a figure without its machine is not a figure."""
    import transformers

    device = torch.device(target.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    return {
        "device": device.type,
        "hardware": name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def processor() -> str:
    """The CPU's name as the system gives it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _column(rows: Sequence[Outcome], name: str) -> list[float]:
    return [float(getattr(o, name)) for o in rows]


def _total(counters: Iterable[Mapping[K, int]]) -> dict[K, int]:
    total: dict[K, int] = {}
    for counter in counters:
        for key, count in counter.items():
            total[key] = total.get(key, 0) + count
    return total


def _interval(interval: stats.Interval | None) -> list[float] | None:
    return list(interval) if interval else None
