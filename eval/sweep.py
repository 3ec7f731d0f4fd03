"""Speed by batch size: `ar` and every decoder at each size, interleaved, and what the tuner chose there.

First turns only. Prompts are repeated where there are fewer than a batch holds: the copies are the same text in
lockstep, so they cost what rows cost.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from data_prep.prompts import Prompt
from eval import harness, results, tune, tunings
from eval.decode import Decoded, decode_keeping
from eval.drafters import Drafter
from eval.memory import NoRoom
from eval.outcome import disjoint, encode, in_dtype, warmup_prompts
from eval.plan import at_batch, batch_sizes, plan
from models.target import Target
from recipes.schema import Recipe

Size = dict[str, Any]  # batch_size as asked, `fits` (measured at), prompts, choice (the tuner's), decoders by label


def sweep(
    recipe: Recipe,
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Prompt],
    folder: Path | None = None,
    known: tunings.Tuning | None = None,
    *,
    calibrated: dict[str, Any] | None = None,
    warmup: Sequence[Prompt] | None = None,
    decode: Callable[..., Decoded] | None = None,
) -> list[Size]:
    """One entry a size of `eval.batch_sizes`, ascending; sizes above one that memory did not hold are left out.

    Settings are the tuner's at each size: those `known`, those beside the drafter in `folder`, or with eval.tune
    measured now.
    """
    decode = decode or decode_keeping(harness.longest_conversation(recipe, target, prompts))
    drafter = in_dtype(drafter, target.dtype) if drafter is not None else None
    spare = disjoint(warmup if warmup is not None else warmup_prompts(), prompts)
    sizes: list[Size] = []
    for size in batch_sizes(recipe.eval):
        sized = at_batch(recipe, size)
        tuned = None
        if known is not None and known["batch_size"] == size:
            tuned = known
        elif recipe.eval.tune and drafter is not None:
            with contextlib.suppress(NoRoom):  # measuring then finds the size that fits, untuned
                tuned = tune.tuning(sized, target, drafter, spare, folder, decode, calibrated)
        elif recipe.eval.tune is None and folder is not None:
            tuned = tunings.read(folder, sized, target)
        entries = [entry for entry in plan(sized, tuned, drafter is not None, calibrated) if entry.timed]
        bench = harness.Bench(sized, target, drafter, entries, decode)
        sizes.append(_at(bench, spare, prompts) | {"choice": tunings.choice(tuned) if tuned else None})
        if bench.no_room:
            break
    return sizes


def _at(bench: harness.Bench, spare: Sequence[Prompt], prompts: Sequence[Prompt]) -> Size:
    asked = bench.size
    harness.warm_up(bench, spare)
    first = [replace(prompt, turns=prompt.turns[:1]) for prompt in prompts]
    fitting = [p for p in first if len(encode(bench.target, bench.recipe, p)) <= bench.limit]
    harness.measure(bench, filled(fitting, bench.size))
    base = {o.id: o for o in bench.outcomes["ar"]}
    wanted = ("tau", "tokens_per_s", "speedup", "speedup_ci95", "ms_per_round_total")
    decoders = {}
    for entry in bench.entries:
        pairs = [(o, base[o.id]) for o in bench.outcomes[entry.label]]
        figures = results.figures(pairs, True, bench.recipe.eval.seed)
        decoders[entry.label] = {key: figures[key] for key in wanted} | {"shape": results.describe(entry.settings)}
    return {
        "batch_size": asked,
        "fits": bench.size,
        "prompts": len(fitting),
        "out_of_memory": bench.no_room,
        "decoders": decoders,
    }


def filled(prompts: Sequence[Prompt], size: int) -> list[Prompt]:
    """Whole batches of `size`: the prompts, and copies of the first of them to fill the last batch."""
    short = -len(prompts) % size if prompts else 0
    copies = [replace(prompts[k % len(prompts)], id=f"{prompts[k % len(prompts)].id}, copy {k}") for k in range(short)]
    return [*prompts, *copies]
