"""Is the output the target's own? Token for token, with near-ties proven before they are excused.

Greedy decoding is compared with `ar`, and `ar` with transformers' generate on the same model. Two correct programs may
part where the two best logits are closer than the rounding of their sums; such a divergence is excused only where both
tokens are within 1e-4 of the best logit in the run's own dtype and again when the prefix is re-scored in float64 (the
norms of transformers compute in float32 whatever the dtype, so that gap is good to about 1e-6).
"""

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from eval.memory import attempt
from eval.outcome import Outcome, row_id
from models.target import Target

if TYPE_CHECKING:
    from eval.harness import Bench

NEAR_TIE = 1e-4
NEAR_STEPS = 4  # of the dtype: up to here a parting may be rounding, and float64 is asked
BATCH = 8  # prompts of one checking call
SPEED_PROMPTS = 2  # on which transformers' generate is timed against `ar`
CHECKS = {
    "speed": "the speed of `ar` against transformers' generate",
    "decoders": "the decoders' outputs against `ar`",
    "float32": "the outputs in float32, for which the target is held twice",
    "generate": "the outputs of `ar` against transformers' generate",
}


@dataclass(frozen=True)
class Parting:
    """Where two outputs part: how far the worse of the two tokens is below the best logit, in the run's dtype and in
    float64 (only looked at where the first is within four steps), and one step of the dtype at that logit."""

    gap: float
    exact_gap: float | None
    step: float


@dataclass
class Tally:
    """Counts over prompts; a prompt is near_tie when it differs and every difference is excused."""

    checked: int = 0
    identical: int = 0
    near_ties: int = 0
    diverged: list[str] = field(default_factory=list)  # prompt ids
    partings: list[Parting] = field(default_factory=list)

    def add(self, name: str, verdict: str) -> None:
        self.checked += 1
        self.identical += verdict == "identical"
        self.near_ties += verdict == "near_tie"
        if verdict == "diverged":
            self.diverged.append(name)

    def record(self) -> dict[str, Any]:
        return {
            "checked": self.checked,
            "identical": self.identical,
            "near_ties": self.near_ties,
            "diverged": self.diverged,
            "partings": [asdict(parting) for parting in self.partings],
        }


class Referee:
    """Judges the first place where two greedy outputs part."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.double: Any = None  # made when first needed
        self.partings: list[Parting] = []

    def compare(self, prompt: list[int], reference: list[int], candidate: list[int]) -> str:
        """identical | near_tie | diverged."""
        if reference == candidate:
            return "identical"
        shorter = min(len(reference), len(candidate))
        place = next((i for i in range(shorter) if reference[i] != candidate[i]), shorter)
        if place == shorter:
            return "diverged"  # the same tokens, but one of the two goes on
        prefix, pair = prompt + reference[:place], [reference[place], candidate[place]]
        gap, step = self._gap(self.model, prefix, pair)
        exact = self._gap(self._in_double(), prefix, pair)[0] if gap < max(NEAR_TIE, NEAR_STEPS * step) else None
        self.partings.append(Parting(gap, exact, step))
        return "near_tie" if exact is not None and max(gap, exact) < NEAR_TIE else "diverged"

    @torch.no_grad()
    def _gap(self, model: Any, prefix: list[int], pair: list[int]) -> tuple[float, float]:
        """How far the worse of two tokens is below the best logit after `prefix`, and one step of the dtype there."""
        ids = torch.tensor([prefix], device=model.device)
        raw = model(input_ids=ids, use_cache=False).logits[0, -1]
        logits = raw.double()
        best = float(logits.max())
        step = torch.finfo(raw.dtype).eps * 2.0 ** math.floor(math.log2(max(abs(best), 1e-30)))
        return best - float(logits[pair].min()), step

    def _in_double(self) -> Any:
        if self.double is None:
            try:
                self.double = copy.deepcopy(self.model).double()
            except torch.OutOfMemoryError:
                self.double = copy.deepcopy(self.model).cpu().double()
        return self.double


@contextmanager
def exact_matmul(target: Target) -> Iterator[None]:
    """TF32 off while a float32 target runs: losslessness is defined without it."""
    if target.dtype != torch.float32 or not torch.cuda.is_available():
        yield
        return
    before = (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def check(bench: "Bench", load_fp32: Callable[[], Target] | None = None) -> dict[str, Any]:
    """All checks of a finished run; verdicts are also left on the outcomes. Nothing to check at T > 0 or lossless = -1.

    Every decoder is compared with `ar` on every prompt (their outputs are at hand), `ar` with generate on
    `eval.lossless` prompts (0 = all). A run in another dtype than float32 repeats both in float32, given `load_fp32`.
    What memory does not hold is named under `no_room`: what was measured before is worth its report.
    """
    e = bench.recipe.eval
    if e.lossless < 0:
        return {}
    wanted: dict[str, Callable[[], dict[str, Any]]] = {"speed": partial(time_generate, bench)}
    referee = Referee(bench.target.model)
    if e.temperature == 0:
        wanted["decoders"] = partial(compare_decoders, referee, bench.outcomes)
        if bench.target.dtype != torch.float32 and load_fp32 is not None:
            wanted["float32"] = partial(check_fp32, bench, load_fp32)
        else:
            base = bench.outcomes["ar"][: e.lossless or None]
            wanted["generate"] = partial(compare_generate, referee, bench.target, base, e.max_new_tokens)
    checks: dict[str, Any] = {"dtype": _name(bench.target.dtype)}
    for name, run in wanted.items():
        if (found := attempt(run)) is not None:
            checks[name] = found
            continue
        referee.partings = []
        checks.setdefault("no_room", []).append(name)
        print(f"out of memory: not checked: {CHECKS[name]}", flush=True)
    _shout(checks)
    return checks


def compare_decoders(referee: Referee, outcomes: dict[str, list[Outcome]]) -> dict[str, Any]:
    """{label: counts} of every decoder against `ar`, prompt by prompt."""
    base = {o.id: o for o in outcomes["ar"]}
    table = {}
    for label, rows in outcomes.items():
        tally = Tally()
        for outcome in rows:
            reference = base[outcome.id]
            turns = zip(reference.prompts, reference.outputs, outcome.outputs, strict=True)
            outcome.verdict = worst([referee.compare(*turn) for turn in turns])
            tally.add(outcome.id, outcome.verdict)
        tally.partings, referee.partings = referee.partings, []
        table[label] = tally.record()
    return table


def compare_generate(
    referee: Referee, target: Target, outcomes: Sequence[Outcome], max_new_tokens: int
) -> dict[str, Any]:
    """Counts of `ar`'s outcomes against transformers' generate, in batches of similar lengths."""
    work = sorted(((len(ids), o, k) for o in outcomes for k, ids in enumerate(o.prompts)), key=lambda item: item[0])
    verdicts: dict[str, list[str]] = {o.id: [] for o in outcomes}
    for start in range(0, len(work), BATCH):
        part = work[start : start + BATCH]
        theirs = generate(target, [o.prompts[k] for _, o, k in part], max_new_tokens)
        for (_, o, k), answer in zip(part, theirs, strict=True):
            verdicts[o.id].append(referee.compare(o.prompts[k], answer, o.outputs[k]))
    tally = Tally()
    for name, found in verdicts.items():
        tally.add(name, worst(found))
    tally.partings, referee.partings = referee.partings, []
    return tally.record()


def check_fp32(bench: "Bench", load: Callable[[], Target]) -> dict[str, Any]:
    """Decode again in float32 on `eval.lossless` prompts, every decoder, and compare as above."""
    e, target = bench.recipe.eval, load()
    drafter = copy.deepcopy(bench.drafter).float() if bench.drafter is not None else None
    base = bench.outcomes["ar"][: e.lossless or None]
    rows = [(o.id, o.category, k, ids) for o in base for k, ids in enumerate(o.prompts)]
    outcomes: dict[str, list[Outcome]] = {entry.label: [] for entry in bench.entries}
    with exact_matmul(target):
        for entry in bench.entries:
            helper = drafter if entry.settings.drafts else None
            for start in range(0, len(rows), BATCH):
                part = rows[start : start + BATCH]
                prompts, row_ids = [ids for *_, ids in part], [row_id(name, turn) for name, _, turn, _ in part]
                matrix = bench.matrix_of(entry)
                decoded = bench.decode(target, helper, prompts, entry.settings, matrix=matrix, row_ids=row_ids)
                for (name, category, turn, ids), row in zip(part, decoded.rows, strict=True):
                    outcome = Outcome(f"{name}, turn {turn + 1}", category, 0)
                    outcome.add(ids, row, decoded)
                    outcomes[entry.label].append(outcome)
        referee = Referee(target.model)
        decoders = compare_decoders(referee, outcomes)
        return {"decoders": decoders, "generate": compare_generate(referee, target, outcomes["ar"], e.max_new_tokens)}


def worst(verdicts: list[str]) -> str:
    for verdict in ("diverged", "near_tie"):
        if verdict in verdicts:
            return verdict
    return "identical"


def generate(target: Target, prompts: Sequence[list[int]], max_new_tokens: int) -> list[list[int]]:
    """transformers' own greedy answers, end token included, left-padded; its generation defaults are set aside."""
    from transformers import GenerationConfig

    T, ends = max(len(ids) for ids in prompts), sorted(target.eos_ids)
    pad = ends[0] if ends else 0
    padded = torch.tensor([[pad] * (T - len(ids)) + ids for ids in prompts], device=target.device)
    real = torch.tensor([[0] * (T - len(ids)) + [1] * len(ids) for ids in prompts], device=target.device)
    config = GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=ends or None, pad_token_id=pad
    )
    own, target.model.generation_config = target.model.generation_config, config  # what is unset is taken from there
    try:
        with torch.no_grad():
            answers = target.model.generate(padded, attention_mask=real, generation_config=config)
    finally:
        target.model.generation_config = own
    return [_until(answer, target.eos_ids) for answer in answers[:, T:].tolist()]


def _until(tokens: list[int], ends: frozenset[int]) -> list[int]:
    """Cut after the first end token: a row that has ended is padded while others go on."""
    end = next((k for k, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: end + 1]


def time_generate(bench: "Bench") -> dict[str, Any]:
    """Tokens/s of `ar` and of transformers' generate, prefill included, in turn on the same prompts at batch 1."""
    entry = next(entry for entry in bench.entries if entry.label == "ar")
    prompts = [o.prompts[0] for o in bench.outcomes["ar"][:SPEED_PROMPTS]]
    tokens = {"ar": 0, "generate": 0}
    seconds = {"ar": 0.0, "generate": 0.0}
    generate(bench.target, prompts[:1], 2)
    for ids in prompts:
        start = time.perf_counter()
        tokens["ar"] += len(bench.run(entry.settings, [ids], [0], None).rows[0].tokens)
        middle = time.perf_counter()
        tokens["generate"] += len(generate(bench.target, [ids], entry.settings.max_new_tokens)[0])
        seconds["ar"] += middle - start
        seconds["generate"] += time.perf_counter() - middle
    return {"prompts": len(prompts), **{f"{k}_tokens_per_s": tokens[k] / max(seconds[k], 1e-9) for k in tokens}}


def _shout(checks: dict[str, Any]) -> None:
    """Say loudly what is not the target's own output."""
    exact = checks if checks["dtype"] == "float32" else checks.get("float32", {})
    tables = {**exact.get("decoders", {}), "ar against transformers' generate": exact.get("generate", {"diverged": []})}
    for label, counts in tables.items():
        if counts["diverged"]:
            names = ", ".join(counts["diverged"][:8])
            print(
                f"\n*** NOT LOSSLESS: {label} differs on {len(counts['diverged'])} prompts in float32: {names} ***\n",
                flush=True,
            )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
