"""What FlexDraft's choices are worth: trains its variants on the same rows and steps, and an EAGLE-3 drafter beside
them, and writes one page of tables.

    python scripts/ablate_flexdraft.py recipe=smollm2-gpu [train.max_steps=200] [eval.limit=120] [flex.key=value ...]
        [eval.batch_sizes=[1,4,16]] [out=docs/flexdraft-ablations.md] [arms=0,8]

Variants differ from the first in one thing each; tau is that of a line of drafts, all of a block verified, T = 0,
prompts that loop in either of two variants left out of what compares them. Both modes are then timed at each batch
size, at the lengths that the tuner finds best for each, and so is what it chooses.

What is trained and decoded stays in the run folder, and the same command again goes on from there. `arms` trains and
decodes some of the variants by their numbers and writes no page: several such processes may share a GPU, since neither
training nor tau depends on the clock; the command without it then finds all and writes the page.
"""

import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from data_prep import states
from data_prep.loops import is_loop
from data_prep.prompts import Prompt, load_prompts
from data_prep.run import Prepared, check, prepare
from eval import stats, sweep, tune
from eval.decode import decode_keeping
from eval.drafters import Drafter, fitted
from eval.harness import UNTIMED_BATCH
from eval.outcome import disjoint, encode, in_dtype, longest_prompt, row_id, warmup_prompts
from eval.plan import at_batch, check_settings, settings_of
from eval.results import environment
from models.device import choose_device, choose_dtype
from models.flexdraft import FlexDraft
from models.target import Target, load_target
from recipes.cli import entry
from recipes.files import check_writable, read_json, run_folder, write_json, write_text
from recipes.schema import Recipe, UserError
from train.backend import make_accelerator
from train.checkpoint import run_identity
from train.cost import kept_features, use_bf16
from train.eagle import EagleFamily
from train.flex_objective import CalibratorLoss, Learning
from train.flexdraft import FlexFamily
from train.loop import Loop
from train.objective import Objective

SIZES = (1, 2, 4, 8, 16, 32, 64)  # batches, unless the recipe names some
STEPS, TIMED_PROMPTS, TIMED_BATCHES, TIMED_TOKENS = 200, 24, 4, 64
LENGTHS, TUNING = (1, 3, 7), 8.0  # drafts that the tuner tries, and its seconds at each batch size
OUT = "docs/flexdraft-ablations.md"


@dataclass(frozen=True)
class Said:
    """One prompt's answer: the rounds that it took, and the tokens that they emitted."""

    tokens: list[int]
    rounds: int
    emitted: int


@dataclass
class Arm:
    """One variant: what differs from the recipe, and what came of it."""

    name: str
    flex: dict[str, Any] = field(default_factory=dict)
    after: bool = False  # a calibrator is fitted to the first variant's masks
    chain: int = 0  # an EAGLE-3 drafter, in chains of so many drafts
    parameters: int = 0
    seconds: float = 0.0
    rows: list[Said] = field(default_factory=list)
    sampled: list[Said] = field(default_factory=list)  # at T = 1, of the first variant and of those with a calibrator

    @property
    def calibrated(self) -> bool:
        return self.after or bool(self.flex.get("calibrator"))

    @property
    def length(self) -> int:
        """Of its lines."""
        return self.chain or int(self.flex["block_size"]) - 1


def arms_of(target_layers: int, layers: int = 0) -> list[Arm]:
    """`layers`: of the recipe, tuned in all variants but two."""
    few, third, half = (max(1, round(target_layers * share)) for share in (1 / 6, 1 / 3, 1 / 2))
    layers = layers or third
    others = sorted({few, third, half} - {layers})[:2]
    first = {"layers": layers, "block_size": 16, "parametrisation": "full", "calibrator": False}
    changes: list[tuple[str, dict[str, Any]]] = [
        (f"{layers} layers, full copies, block 16", {}),
        *((f"{count} layers", {"layers": count}) for count in others),
        ("low-rank adapters", {"parametrisation": "lora"}),
        ("whole layers, feed-forward blocks too", {"parametrisation": "layers"}),
        ("block 8", {"block_size": 8}),
        ("block 4", {"block_size": 4}),
        ("calibrator, learned with the masks", {"calibrator": True}),
    ]
    arms = [Arm(name, first | change) for name, change in changes]
    chains = [Arm(f"EAGLE-3, chain of {length}", chain=length) for length in (15, 7, 3)]
    return [*arms, Arm("calibrator, fitted after them", first, after=True), *chains]


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

    def folder(self, arm: Arm) -> Path:
        """One of all chains: they differ in decoding alone."""
        name = "EAGLE-3" if arm.chain else arm.name.replace(" ", "-").replace(",", "")
        return run_folder(self.recipe) / "ablations" / name

    def record(self, arm: Arm) -> Path:
        return self.folder(arm) / f"decoded-{arm.length}.json"

    def identity(self, arm: Arm) -> dict[str, str]:
        data, name = str(self.prepared.report["hash"]), self.folder(arm).name
        return run_identity(self.of(arm), "eagle" if arm.chain else "flex", arm=name, data=data)

    def about(self, arm: Arm) -> dict[str, Any]:
        prompts, tokens = [prompt.id for prompt in self.prompts], self.recipe.eval.max_new_tokens
        return {"identity": self.identity(arm), "prompts": prompts, "tokens": tokens}


def learner(bench: Bench, arm: Arm, masks: Drafter | None) -> tuple[Objective, Drafter]:
    """What is trained, and what then decodes; `masks` are the first variant's."""
    recipe = bench.of(arm)
    if arm.after:
        assert isinstance(masks, FlexDraft)
        whole = FlexDraft(replace(masks.config, calibrator_rank=recipe.flex.calibrator_rank)).to(bench.target.device)
        whole.load_state_dict(whole.state_dict() | masks.state_dict())
        learning = Learning(recipe.flex, recipe.seed, bench.bf16, kept_features(recipe))
        return CalibratorLoss(whole, bench.teacher, learning), whole
    family = EagleFamily() if arm.chain else FlexFamily()
    objective, _ = family.objective(recipe, bench.target, bench.teacher, bench.prepared, bench.bf16)
    return objective, family.drafter(objective.drafter)


def trained(bench: Bench, arm: Arm, masks: Drafter | None) -> Drafter:
    """The arm's drafter, from its checkpoint where there is one."""
    recipe, folder = bench.of(arm), bench.folder(arm)
    torch.manual_seed(recipe.seed)
    objective, whole = learner(bench, arm, masks)
    arm.parameters = sum(p.numel() for p in objective.drafter.parameters() if p.requires_grad)
    folder.mkdir(parents=True, exist_ok=True)
    accelerator = make_accelerator(bench.target.device, recipe.train.clip)
    start = time.perf_counter()
    Loop(recipe, objective, bench.prepared.train, accelerator, folder).run(bench.identity(arm), None, {})
    arm.seconds = time.perf_counter() - start
    return whole.eval()


def known(bench: Bench, arm: Arm) -> bool:
    """Whether an earlier run trained and decoded the arm; what it found is taken over."""
    path = bench.record(arm)
    found = read_json(path, "decoded prompts (delete the file)") if path.is_file() else {}
    if found.get("about") != bench.about(arm):
        return False
    arm.parameters, arm.seconds = found["parameters"], found["seconds"]
    arm.rows, arm.sampled = ([Said(**row) for row in found[key]] for key in ("rows", "sampled"))
    return True


def decoded(bench: Bench, arm: Arm, drafter: Drafter, temperature: float = 0.0) -> list[Said]:
    """Every prompt's first turn, all drafts of each line verified. What the target says depends on no drafter, sampled
    or not."""
    recipe, length = bench.of(arm), arm.length
    e = replace(recipe.eval, temperature=temperature, verifier="match", draft_temperature=0.0, chain_length=length)
    e = fitted(replace(recipe, eval=e), drafter).eval
    settings = settings_of("chain", e) if arm.chain else settings_of("flex", e, gates=(0.0,), parallel=False)
    ids = [encode(bench.target, recipe, prompt) for prompt in bench.prompts]
    rows = [row_id(prompt.id, 0) for prompt in bench.prompts]
    served = in_dtype(drafter, bench.target.dtype)
    slots = UNTIMED_BATCH[bench.target.device.type]
    results = decode_keeping()(bench.target, served, ids, settings, matrix=None, row_ids=rows, slots=slots).rows
    return [Said(row.tokens, row.rounds, row.emitted) for row in results]


def column(rows: Sequence[Said], key: str) -> list[float]:
    return [float(getattr(row, key)) for row in rows]


def columns(one: Sequence[Said], other: Sequence[Said]) -> list[list[float]]:
    """Emitted and rounds of the one, then of the other, of the prompts that loop in neither."""
    pairs = [pair for pair in zip(one, other, strict=True) if not any(is_loop(row.tokens) for row in pair)]
    return [column([pair[k] for pair in pairs], key) for k in (0, 1) for key in ("emitted", "rounds")]


def words(interval: stats.Interval | None, form: str = ".2f") -> str:
    return "" if interval is None else f" [{interval[0]:{form}}, {interval[1]:{form}}]"


def arm_table(arms: list[Arm]) -> str:
    head = "variant | trained parameters | training, s | tau [95 %] | against the first [95 %, paired]"
    lines = [f"| {head} | x EAGLE-3's chain as long [95 %, paired] | loops |", "|---" * 7 + "|"]
    first = arms[0]
    for arm in arms:
        loops = [is_loop(row.tokens) for row in arm.rows]
        kept = [row for row, loop in zip(arm.rows, loops, strict=True) if not loop]
        tau = stats.ratio(column(kept, "emitted"), column(kept, "rounds"))
        interval = words(stats.ratio_interval(column(kept, "emitted"), column(kept, "rounds")))
        gain = share = ""
        if arm is not first:
            a, b, c, d = columns(first.rows, arm.rows)
            gain = f"{stats.ratio(c, d) - stats.ratio(a, b):+.2f}{words(stats.difference_interval(a, b, c, d), '+.2f')}"
        chain = next((one for one in arms if one.chain == arm.length), None)
        if chain is not None and not arm.chain:
            a, b, c, d = columns(chain.rows, arm.rows)
            share = f"{stats.ratio(c, d) / max(stats.ratio(a, b), 1e-9):.2f}"
            share += words(stats.speedup_interval(c, d, a, b))
        numbers = f"{arm.parameters:,} | {arm.seconds:.0f} | {tau:.2f}{interval} | {gain} | {share}"
        lines.append(f"| {arm.name} | {numbers} | {sum(loops)} of {len(loops)} |")
    return "\n".join(lines)


def calibration_table(arms: list[Arm]) -> str:
    """What a calibrator adds to the tau of the first variant, which has none."""
    lines = ["| calibrator | T | tau without | with | difference [95 %, paired] |", "|---" * 5 + "|"]
    for arm in arms:
        for temperature, one, other in ((0, arms[0].rows, arm.rows), (1, arms[0].sampled, arm.sampled)):
            if arm.calibrated and one and other:
                a, b, c, d = columns(one, other)
                without, tau = stats.ratio(a, b), stats.ratio(c, d)
                ends = words(stats.difference_interval(a, b, c, d), "+.3f")
                lines.append(f"| {arm.name} | {temperature} | {without:.3f} | {tau:.3f} | {tau - without:+.3f}{ends} |")
    return "\n".join(lines)


@dataclass(frozen=True)
class Timed:
    """One batch size: what the tuner chose there, and each mode's figures at its best length, with those of `ar`."""

    size: int
    choice: dict[str, Any]
    lengths: dict[str, int]
    modes: dict[str, sweep.Size]


def timed(bench: Bench, drafter: Drafter, sizes: Sequence[int]) -> list[Timed]:
    decode, warm, found = decode_keeping(), disjoint(warmup_prompts(), bench.prompts), []
    most = min(TIMED_TOKENS, bench.recipe.eval.max_new_tokens)
    e = replace(bench.recipe.eval, decoders=["ar", "flex"], flex_mode="auto", temperature=0.0, max_new_tokens=most)
    e = fitted(replace(bench.recipe, eval=replace(e, batch_sizes=[], tune=False)), drafter).eval
    lines = [s for s in tune.block_candidates(e, ["flex"], max(LENGTHS), gpu=True) if s.depth in LENGTHS]
    for size in sizes:
        sized = at_batch(replace(bench.recipe, eval=e), size)
        settings = [settings_of("ar", e), *lines]
        tuned = tune.tune(sized, bench.target, drafter, warm, decode=decode, budget=TUNING, settings=settings)
        lengths, modes = {}, {}
        for mode in ("sequential", "parallel"):
            ranked = (row for row in tuned["table"] if row["decoder"] == "flex")
            best = (row["depth"] for row in ranked if row["parallel"] == (mode == "parallel"))
            lengths[mode] = next(best, LENGTHS[0])
            fixed = replace(e, flex_mode=mode, chain_length=lengths[mode], batch_size=size)
            prompts = bench.prompts[: max(TIMED_PROMPTS, TIMED_BATCHES * size)]
            found_here = sweep.sweep(replace(sized, eval=fixed), bench.target, drafter, prompts, decode=decode)
            modes[mode] = found_here[0]
        found.append(Timed(size, tuned["chosen"], lengths, modes))
    return found


def mode_table(found: list[Timed]) -> str:
    lines = [
        "| batch | `ar`, tokens/s | sequential, x `ar` [95 %] | parallel, x `ar` [95 %] | the tuner's choice, x `ar` |",
        "|---" * 5 + "|",
    ]
    for one in found:
        cells, speeds = [], {"ar": 1.0}
        for mode, size in one.modes.items():
            flex = size["decoders"]["flex"]
            speeds[mode] = flex["speedup"]
            about = f"tau {flex['tau']:.2f}, {one.lengths[mode]} drafts"
            cells.append(f"{flex['speedup']:.2f}{words(flex['speedup_ci95'])}, {about}")
        chosen = one.choice["decoder"]
        if chosen == "flex":
            chosen = "parallel" if one.choice["parallel"] else "sequential"
        plain = one.modes["sequential"]["decoders"]["ar"]["tokens_per_s"]
        fits = one.modes["sequential"]["fits"]
        lines.append(f"| {fits} | {plain:.0f} | {' | '.join(cells)} | {chosen}, {speeds[chosen]:.2f} |")
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
        "tau is that of a line, every draft of a block verified; a block of n drafts n - 1 tokens, so that smaller "
        f"ones have lower ceilings. EAGLE-3 (unroll {recipe.eagle.unroll_steps}) learned from the same rows in as many "
        "steps. Looping answers are left out.",
        f"## Calibration, and sampled text\n\n{calibration_table(arms)}",
        f"## Drafting in parallel or after verification, by batch\n\n{modes}\n\nOf the first variant. Lengths are the "
        f"tuner's, of {', '.join(map(str, LENGTHS))}; {TIMED_TOKENS} new tokens."
        if modes
        else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def make_bench(recipe: Recipe, only: str) -> Bench:
    check_settings(recipe)
    if recipe.dry_run:
        raise UserError("dry_run is not for this script")
    _, source = check(recipe)
    assert source is not None, "None in a dry run alone"
    chosen(arms_of(source.n_layers, recipe.flex.layers), only)
    FlexFamily().check(recipe, source)
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


def main(recipe: Recipe, only: str = "") -> None:
    """`only`: numbers of variants, for which no page is written."""
    settled = replace(recipe.train, max_steps=recipe.train.max_steps or STEPS, tracker="none", keep=1)
    out = Path(recipe.out or OUT).expanduser()
    check_writable(out.parent)
    bench = make_bench(replace(recipe, train=settled), only)
    arms, masks, modes = arms_of(bench.target.n_layers, recipe.flex.layers), None, ""
    for arm in chosen(arms, only):
        if not known(bench, arm):
            if arm.after and masks is None:
                masks = trained(bench, arms[0], None)
            drafter = trained(bench, arm, masks)
            arm.rows = decoded(bench, arm, drafter)
            arm.sampled = decoded(bench, arm, drafter, 1.0) if arm.calibrated or arm is arms[0] else []
            said = {"rows": [asdict(row) for row in arm.rows], "sampled": [asdict(row) for row in arm.sampled]}
            about = {"about": bench.about(arm), "parameters": arm.parameters, "seconds": arm.seconds}
            write_json(bench.record(arm), about | said)
            masks = drafter if arm is arms[0] else masks
        rounds = max(1, sum(row.rounds for row in arm.rows))
        tau = sum(row.emitted for row in arm.rows) / rounds
        print(f"{arm.name}: trained in {arm.seconds:.0f} s, tau {tau:.3f}, loops among it", flush=True)
        if not only:
            write_text(out, page(bench, arms, modes))
    if only:
        return
    masks = trained(bench, replace(arms[0]), None) if masks is None else masks
    modes = mode_table(timed(bench, masks, tuple(recipe.eval.batch_sizes) or SIZES))
    write_text(out, page(bench, arms, modes))
    print(f"written to {out}")


def chosen(arms: list[Arm], only: str) -> list[Arm]:
    if not only:
        return arms
    try:
        return [arms[int(number)] for number in only.split(",")]
    except (ValueError, IndexError) as error:
        names = "\n".join(f"  {number}: {arm.name}" for number, arm in enumerate(arms))
        raise UserError(f"arms={only}: give numbers, with commas between them, of\n{names}") from error


if __name__ == "__main__":
    words_given = [word for word in sys.argv[1:] if word.startswith("arms=")]
    others = [word for word in sys.argv[1:] if word not in words_given]
    entry(partial(main, only="".join(words_given).removeprefix("arms=")), others)
