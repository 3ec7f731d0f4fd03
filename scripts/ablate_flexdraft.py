"""What FlexDraft's choices are worth: trains its variants on the same rows and steps, and writes one page of tables.

    python scripts/ablate_flexdraft.py recipe=smollm2-gpu [train.max_steps=200] [eval.limit=120] [flex.key=value ...]
        [eval.batch_sizes=[1,2,4]] [out=docs/flexdraft-ablations.md]

Variants differ from the first in one thing each; tau is `flex`, sequential, with every draft of a block verified,
T = 0, prompts that loop in either of two variants left out of their difference. Both modes are then timed at each batch
size. The page is written again after every part, so that what an interruption leaves is whole; the same command again
goes on from the checkpoints that it left. One process, one GPU (or a CPU, with patience).
"""

import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from data_prep import states
from data_prep.loops import is_loop
from data_prep.prompts import Prompt, load_prompts
from data_prep.run import Prepared, check, prepare
from eval import stats, sweep
from eval.decode import RowResult, decode_keeping
from eval.drafters import fitted
from eval.harness import UNTIMED_BATCH
from eval.outcome import encode, in_dtype, longest_prompt, row_id
from eval.plan import at_batch, check_settings, settings_of
from eval.results import environment
from models.flexdraft import FlexDraft
from models.target import Target, choose_device, choose_dtype, load_target
from recipes.cli import entry
from recipes.files import run_folder, write_text
from recipes.schema import Recipe, UserError
from train.backend import make_accelerator
from train.checkpoint import Store, run_identity
from train.cost import kept_features, use_bf16
from train.flex_objective import CalibratorLoss, Learning, MaskLoss
from train.flexdraft import FlexFamily
from train.loop import Loop

SIZES = (1, 2, 4, 8, 16, 32, 64)  # batches, unless the recipe names some
STEPS, TIMED_PROMPTS, TIMED_TOKENS = 200, 64, 64
OUT = "docs/flexdraft-ablations.md"


@dataclass
class Arm:
    """One variant: what differs from the recipe, and what came of it."""

    name: str
    flex: dict[str, Any] = field(default_factory=dict)
    after: bool = False  # a calibrator is fitted to the first variant's masks
    parameters: int = 0
    seconds: float = 0.0
    before: bool = False  # (part of) its training was done by an earlier run
    rows: list[RowResult] = field(default_factory=list)


def arms_of(target_layers: int) -> list[Arm]:
    few, some, many = (max(1, round(target_layers * share)) for share in (1 / 6, 1 / 3, 1 / 2))
    first = {"layers": some, "block_size": 16, "parametrisation": "full", "calibrator": False}
    changes: list[tuple[str, dict[str, Any]]] = [
        (f"{some} layers, full copies, block 16", {}),
        (f"{few} layers", {"layers": few}),
        (f"{many} layers", {"layers": many}),
        ("low-rank adapters", {"parametrisation": "lora"}),
        ("whole layers, feed-forward blocks too", {"parametrisation": "layers"}),
        ("block 8", {"block_size": 8}),
        ("block 4", {"block_size": 4}),
        ("calibrator, learned with the masks", {"calibrator": True}),
    ]
    arms = [Arm(name, first | change) for name, change in changes]
    return [*arms, Arm("calibrator, fitted after them", first, after=True)]


@dataclass(frozen=True)
class Bench:
    recipe: Recipe
    target: Target
    teacher: Target
    prepared: Prepared
    prompts: list[Prompt]
    bf16: bool

    def of(self, arm: Arm) -> Recipe:
        return replace(self.recipe, flex=replace(self.recipe.flex, **arm.flex))


def trained(bench: Bench, arm: Arm, masks: FlexDraft | None) -> FlexDraft:
    """The arm's drafter, from its checkpoint where there is one."""
    recipe = bench.of(arm)
    torch.manual_seed(recipe.seed)
    objective: MaskLoss
    if arm.after:
        assert masks is not None
        whole = FlexDraft(replace(masks.config, calibrator_rank=recipe.flex.calibrator_rank)).to(bench.target.device)
        whole.load_state_dict(whole.state_dict() | masks.state_dict())
        learning = Learning(recipe.flex, recipe.seed, bench.bf16, kept_features(recipe))
        objective = CalibratorLoss(whole, bench.teacher, learning)
    else:
        made, _ = FlexFamily().objective(recipe, bench.target, bench.teacher, bench.prepared, bench.bf16)
        assert isinstance(made, MaskLoss) and isinstance(made.drafter, FlexDraft)
        objective, whole = made, made.drafter
    arm.parameters = sum(p.numel() for p in objective.drafter.parameters() if p.requires_grad)
    folder = run_folder(bench.recipe) / "ablations" / arm.name.replace(" ", "-").replace(",", "")
    folder.mkdir(parents=True, exist_ok=True)
    arm.before = bool(Store(folder).steps())
    accelerator = make_accelerator(bench.target.device, recipe.train.clip)
    start = time.perf_counter()
    Loop(recipe, objective, bench.prepared.train, accelerator, folder).run(
        run_identity(recipe, "flex", arm=arm.name, data=str(bench.prepared.report["hash"])), None, {}
    )
    arm.seconds = time.perf_counter() - start
    return whole.eval()


def decoded(bench: Bench, arm: Arm, drafter: FlexDraft) -> list[RowResult]:
    """Every prompt's first turn, all drafts of each block verified."""
    recipe = bench.of(arm)
    length = drafter.config.block_size - 1
    greedy = replace(recipe.eval, temperature=0.0, chain_length=length)
    settings = settings_of("flex", fitted(replace(recipe, eval=greedy), drafter).eval, gates=(0.0,), parallel=False)
    ids = [encode(bench.target, recipe, prompt) for prompt in bench.prompts]
    rows = [row_id(prompt.id, 0) for prompt in bench.prompts]
    served = in_dtype(drafter, bench.target.dtype)
    slots = UNTIMED_BATCH[bench.target.device.type]
    return decode_keeping()(bench.target, served, ids, settings, matrix=None, row_ids=rows, slots=slots).rows


def column(rows: Sequence[RowResult], key: str) -> list[float]:
    return [float(getattr(row, key)) for row in rows]


def words(interval: stats.Interval | None, sign: str = "") -> str:
    return "" if interval is None else f" [{interval[0]:{sign}.2f}, {interval[1]:{sign}.2f}]"


def arm_table(arms: list[Arm]) -> str:
    lines = ["| variant | trained parameters | training, s | tau [95 %] | against the first [95 %, paired] | loops |"]
    lines.append("|---" * 6 + "|")
    first = arms[0]
    for arm in arms:
        loops = [is_loop(row.tokens) for row in arm.rows]
        kept = [row for row, loop in zip(arm.rows, loops, strict=True) if not loop]
        tau = stats.ratio(column(kept, "emitted"), column(kept, "rounds"))
        interval = words(stats.ratio_interval(column(kept, "emitted"), column(kept, "rounds")))
        gain = ""
        if arm is not first:
            pairs = [
                pair for pair in zip(first.rows, arm.rows, strict=True) if not any(is_loop(row.tokens) for row in pair)
            ]
            columns = [column([pair[k] for pair in pairs], key) for k in (0, 1) for key in ("emitted", "rounds")]
            change = stats.ratio(columns[2], columns[3]) - stats.ratio(columns[0], columns[1])
            difference = stats.difference_interval(columns[0], columns[1], columns[2], columns[3])
            gain = f"{change:+.2f}{words(difference, '+')}"
        seconds = "earlier" if arm.before else f"{arm.seconds:.0f}"
        numbers = f"{arm.parameters:,} | {seconds} | {tau:.2f}{interval} | {gain}"
        lines.append(f"| {arm.name} | {numbers} | {sum(loops)} of {len(loops)} |")
    return "\n".join(lines)


def timed(bench: Bench, drafter: FlexDraft, sizes: Sequence[int]) -> dict[str, list[sweep.Size]]:
    """Both modes beside `ar` at each batch size, `eval.flex_threshold` in force."""
    found = {}
    for mode in ("sequential", "parallel"):
        e = replace(
            bench.recipe.eval, decoders=["ar", "flex"], flex_mode=mode, tune=False, batch_sizes=list(sizes),
            temperature=0.0, max_new_tokens=min(TIMED_TOKENS, bench.recipe.eval.max_new_tokens),
        )  # fmt: skip
        recipe = fitted(at_batch(replace(bench.recipe, eval=e), sizes[0]), drafter)
        found[mode] = sweep.sweep(recipe, bench.target, drafter, bench.prompts[:TIMED_PROMPTS])
    return found


def mode_table(found: dict[str, list[sweep.Size]]) -> str:
    lines = [
        "| batch | `ar`, tokens/s | sequential, x `ar` [95 %] | parallel, x `ar` [95 %] | faster |",
        "|---" * 5 + "|",
    ]
    for one, other in zip(found["sequential"], found["parallel"], strict=False):
        speeds = {"ar": 1.0}
        cells = []
        for mode, size in (("sequential", one), ("parallel", other)):
            flex = size["decoders"]["flex"]
            speeds[mode] = flex["speedup"]
            cells.append(f"{flex['speedup']:.2f}{words(flex['speedup_ci95'])}, tau {flex['tau']:.2f}")
        plain = one["decoders"]["ar"]["tokens_per_s"]
        best = max(speeds, key=lambda name: speeds[name])
        lines.append(f"| {one['fits']} | {plain:.0f} | {' | '.join(cells)} | {best} |")
    return "\n".join(lines)


def page(bench: Bench, arms: list[Arm], modes: str) -> str:
    about, recipe, data = environment(bench.target), bench.recipe, bench.prepared.train
    answers = int((data.answer > 0).sum())
    command = shlex.join(["python", "scripts/ablate_flexdraft.py", *sys.argv[1:]])
    t, count = recipe.train, len(bench.prompts)
    told = (
        f"`{command}` on {about['hardware']}, {about['dtype']}, torch {about['torch']}. Target {recipe.target.path}. "
        f"Every variant: {t.max_steps} steps of about {t.batch_tokens:,} tokens of the same {len(data):,} rows "
        f"({answers:,} answer tokens), {recipe.flex.anchors} groups a row, learning rate {t.learning_rate:g}, seed "
        f"{recipe.seed}. One training each: intervals are over the {count} prompts (`{recipe.eval.prompts}`, "
        f"{recipe.eval.max_new_tokens} new tokens, T = 0), not over trainings."
    )
    parts = [
        "# What FlexDraft's choices are worth",
        told,
        "## Variants",
        arm_table([arm for arm in arms if arm.rows]),
        "tau is `flex`, sequential, every draft of a block verified; a block of n drafts n - 1 tokens, so that smaller "
        "ones have lower ceilings. Looping answers are left out.",
        f"## Drafting in parallel or after verification, by batch\n\n{modes}" if modes else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def make_bench(recipe: Recipe) -> Bench:
    check_settings(recipe)
    if recipe.dry_run:
        raise UserError("dry_run is not for this script")
    _, source = check(recipe)
    assert source is not None, "None in a dry run alone"
    device = choose_device(recipe.device)
    target = load_target(recipe.target, device, choose_dtype(recipe.target.dtype, device))

    def load(dtype: torch.dtype) -> Target:
        return target if dtype == target.dtype else load_target(recipe.target, device, dtype)

    prepared = prepare(recipe, load, source)
    bf16 = use_bf16(recipe, device)
    teacher = load(states.forward_dtype(recipe, device, bf16))
    limit = longest_prompt(target, recipe.eval)
    prompts = [
        p for p in load_prompts(recipe.eval.prompts, recipe.eval.limit) if len(encode(target, recipe, p)) <= limit
    ]
    return Bench(recipe, target, teacher, prepared, prompts, bf16)


def main(recipe: Recipe) -> None:
    settled = replace(recipe.train, max_steps=recipe.train.max_steps or STEPS, tracker="none", keep=1)
    bench = make_bench(replace(recipe, train=settled))
    out = Path(recipe.out or OUT).expanduser()
    arms, masks, modes = arms_of(bench.target.n_layers), None, ""
    for arm in arms:
        drafter = trained(bench, arm, masks)
        arm.rows = decoded(bench, arm, drafter)
        write_text(out, page(bench, arms, modes))
        print(f"{arm.name}: trained in {arm.seconds:.0f} s", flush=True)
        if masks is None:
            masks = drafter
            modes = mode_table(timed(bench, drafter, tuple(recipe.eval.batch_sizes) or SIZES))
            write_text(out, page(bench, arms, modes))
    print(f"written to {out}")


if __name__ == "__main__":
    entry(main)
