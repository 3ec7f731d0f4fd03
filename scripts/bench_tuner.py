"""Is the tuner's choice the best of a measured grid? At each batch size: tune, then measure every setting of a grid on
the same prompts, interleaved, and print each beside plain decoding.

    python scripts/bench_tuner.py recipe=smollm2-gpu drafter=DIR eval.batch_sizes=[1,4,16,64] [settings=24] [budget=20]

`settings` (0: all) of the tuner's candidates are left in, spread over decoders and sizes: all of them take minutes a
batch size on a GPU, where each is recorded first. `budget` is the tuner's, in seconds. It writes nothing.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from eval import tune, tunings
from eval.drafters import fitted
from eval.outcome import warmup_prompts
from eval.plan import at_batch, batch_sizes, check_settings
from eval.run import calibrated_gates, check_models, load, with_calibrated_gates
from eval.settings import Settings
from recipes import loading
from recipes.cli import told


def thinned(settings: Sequence[Settings], count: int) -> list[Settings]:
    """`ar`, which comes first, and `count` - 1 of the others, evenly spaced; all where `count` is 0."""
    others = settings[1:]
    if not 0 < count <= len(others):
        return list(settings)
    return [settings[0], *(others[k * len(others) // (count - 1)] for k in range(count - 1))]


def main(argv: list[str]) -> None:
    own = {"settings": "24", "budget": "20"}
    own |= {key: value for key, _, value in (a.partition("=") for a in argv) if key in own}
    recipe = loading.load([a for a in argv if a.partition("=")[0] not in own])
    check_settings(recipe)
    check_models(recipe)
    target, drafter, _ = load(recipe)
    gates = calibrated_gates(recipe)
    recipe, lines = fitted(with_calibrated_gates(recipe, gates), drafter), []
    for size in batch_sizes(recipe.eval):
        start, sized = time.perf_counter(), at_batch(recipe, size)
        settings = thinned(tune.candidates(sized, target.device.type, drafter, gates), int(own["settings"]))
        found = tune.judged(sized, target, drafter, warmup_prompts(), settings, float(own["budget"]))
        *grid, last = tunings.grid_lines(found)
        lines.append(f"{last} ({len(grid)} settings, {time.perf_counter() - start:.0f} s)")
        print("\n".join([*grid, lines[-1]]), flush=True)
    print("\n".join(lines))


if __name__ == "__main__":
    told(lambda: main(sys.argv[1:]))
