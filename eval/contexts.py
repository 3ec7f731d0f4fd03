"""What a round costs at contexts longer than the prompts that settings were chosen on.

A longer context makes every row dearer, and a tree's rows more so than the one of plain decoding. Each decoder's best
setting decodes a few rounds behind prompts of so many tokens, made of validation prompts end to end. The speed that is
predicted there takes tokens a round from the tuner's own prompts: what an answer to the patched-up text accepts says
nothing of real ones.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, cycle, islice
from typing import Any

from data_prep.prompts import Prompt
from eval.decode import Decoded, decode_keeping, ready
from eval.drafters import Drafter
from eval.memory import attempt, unpaused
from eval.outcome import encode, in_dtype, longest_prompt, new_matrix
from eval.plan import settings_of, tuned_shapes
from eval.settings import Settings
from models.target import Target
from recipes.schema import Recipe

CONTEXTS = (512, 2048, 8192, 32768)  # those that the recipe takes are measured
TOKENS, PASSES = 24, 3  # of an answer, and how often each decoder's turn comes

Costs = dict[str, Any]  # context, and by decoder ms_per_round and tokens_per_s


def by_context(
    recipe: Recipe,
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    tuned: dict[str, Any],
    *,
    decode: Callable[..., Decoded] | None = None,
) -> list[Costs]:
    """One entry a context, ascending, up to the longest that the recipe takes and memory holds: of `ar` and of the best
    setting of each decoder, milliseconds of a (batch) round and predicted tokens/s of the full batch."""
    e, best, found = recipe.eval, tuned["best"], list[Costs]()
    drafter, short = in_dtype(drafter, target.dtype), min(TOKENS, e.max_new_tokens)
    wanted = {"ar": settings_of("ar", e, max_new_tokens=short)}
    for name, row in best.items():
        shape = tuned_shapes({"best": {name: row}}, [name])[name]
        wanted[name] = settings_of(name, e, **shape, max_new_tokens=short)
    taus = {"ar": 1.0} | {name: row["tau"] for name, row in best.items()}
    text = list(chain.from_iterable(encode(target, recipe, prompt) for prompt in prompts))
    for context in (n for n in CONTEXTS if n <= longest_prompt(target, e)):
        rows = [list(islice(cycle(text), 7 * row, 7 * row + context)) for row in range(e.batch_size)]
        run = partial(_decoded, target, drafter, rows, decode or decode_keeping(context))
        costs = _costs(run, wanted)
        if "ar" not in costs:
            print(f"out of memory at {context:,} tokens of context, batch {e.batch_size}")
            break
        speeds = {name: 1000 * e.batch_size * taus[name] / cost for name, cost in costs.items()}
        found.append({"context": context, "ms_per_round": costs, "tokens_per_s": speeds})
    return found


def _decoded(
    target: Target, drafter: Drafter, rows: list[list[int]], decode: Callable[..., Decoded], settings: Settings
) -> Decoded:
    matrix, helper = new_matrix(target) if settings.remembers else None, drafter if settings.drafts else None
    return ready(partial(decode, target, helper, rows, settings, matrix=matrix, row_ids=[*range(len(rows))]), matrix)


def _costs(run: Callable[[Settings], Decoded], wanted: dict[str, Settings]) -> dict[str, float]:
    """Median milliseconds of a round, the decoders taking turns; those that memory does not hold are left out."""
    times: dict[str, list[float]] = defaultdict(list)
    with unpaused():
        for _ in range(PASSES):
            for name, settings in wanted.items():
                decoded = attempt(partial(run, settings))
                if decoded is not None and decoded.rounds_total:
                    times[name].append(1000 * decoded.decode_seconds / decoded.rounds_total)
    return {name: statistics.median(found) for name, found in times.items()}
