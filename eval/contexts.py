"""What a round costs at contexts longer than the prompts that settings were chosen on.

A longer context makes every row dearer, and a tree's rows more so than the one of plain decoding. Each decoder's best
setting decodes a few rounds behind prompts of so many tokens: validation prompts end to end, again and again where they
are too few, and a whole one last. The speed that is predicted there takes tokens a round from the tuner's own prompts:
what is accepted behind a patched-up text says nothing of real ones. Graft fills all places that its gates free, since
its account begins so: a round of it may be cheaper in service.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
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

CONTEXTS = (512, 2048, 8192, 32768)
TOKENS, PASSES = 24, 2  # of an answer, and how often each decoder's turn comes

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
    """One entry a context, ascending, up to the longest that memory holds: of `ar`, of the setting that `tuned` chose
    and of the best one of each other decoder, milliseconds of a (batch) round and predicted tokens/s of the full batch.
    """
    e, found, chosen = recipe.eval, list[Costs](), tuned["chosen"]
    best = tuned["best"] | ({chosen["decoder"]: chosen} if chosen["decoder"] != "ar" else {})
    drafter, short = in_dtype(drafter, target.dtype), min(TOKENS, e.max_new_tokens)
    wanted = {"ar": settings_of("ar", e, max_new_tokens=short)}
    for name, row in best.items():
        shape = tuned_shapes({"best": {name: row}}, [name])[name]
        wanted[name] = settings_of(name, e, **shape, max_new_tokens=short)
    taus = {"ar": 1.0} | {name: row["tau"] for name, row in best.items()}
    texts = [encode(target, recipe, prompt) for prompt in prompts]
    for context in (tokens for tokens in CONTEXTS if tokens <= longest_prompt(target, e)):
        print(f"rounds behind {context:,} tokens of context: {len(wanted)} decoders, batch {e.batch_size}", flush=True)
        rows = [_patched(texts, row, context) for row in range(e.batch_size)]
        run = partial(_decoded, target, drafter, rows, decode or decode_keeping(context))
        costs = _costs(run, wanted)
        if missing := [name for name in wanted if name not in costs]:
            print(f"out of memory at {context:,} tokens of context, batch {e.batch_size}: {', '.join(missing)}")
        if "ar" not in costs:
            break
        speeds = {name: 1000 * e.batch_size * taus[name] / cost for name, cost in costs.items()}
        found.append({"context": context, "ms_per_round": costs, "tokens_per_s": speeds})
    return found


def _patched(texts: list[list[int]], last: int, context: int) -> list[int]:
    """So many tokens of the texts end to end, the `last` of them at the end and whole, if it is not longer."""
    last %= len(texts)
    line = list(chain.from_iterable([*texts[last + 1 :], *texts[: last + 1]]))
    return (line * -(-context // len(line)))[-context:]


def _decoded(
    target: Target, drafter: Drafter, rows: list[list[int]], decode: Callable[..., Decoded], settings: Settings
) -> Decoded:
    """No row ends before the others, whatever it says: a round is one of the full batch."""
    matrix, helper = new_matrix(target) if settings.remembers else None, drafter if settings.drafts else None
    ids = [*range(len(rows))]
    return ready(partial(decode, target, helper, rows, settings, matrix=matrix, row_ids=ids, ends=frozenset()), matrix)


def _costs(run: Callable[[Settings], Decoded], wanted: dict[str, Settings]) -> dict[str, float]:
    """Median milliseconds of a round, the decoders taking turns; those that memory does not hold, not even when what
    others left in it is gone, are left out."""
    times, left = defaultdict[str, list[float]](list), dict(wanted)
    with unpaused():
        for _ in range(PASSES):
            for name, settings in [*left.items()]:
                once = partial(run, settings)
                decoded = attempt(once) or attempt(once)
                if decoded is None:
                    del left[name]
                else:
                    times[name].append(1000 * decoded.decode_seconds / max(1, decoded.rounds_total))
    return {name: statistics.median(times[name]) for name in left}
