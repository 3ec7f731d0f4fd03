"""What a training step costs: ours, SpecForge's where it is installed, and the bare products and attention of the step.

    python scripts/bench_train.py [shapes=qwen3-8b] [rows=4] [length=2048] [supervised=all|half] [rounds=10] [warm=3]
        [arms=ours,specforge,products,attention] [sweep=false] [recompute=false] [objective=soft_ce] [device=auto]
        [backend=flex_attention] [specforge_chunked=true] [dtype=auto] [out=FILE.json]

The target's hidden states are given; a step is everything from them to the changed weights: the teacher's head over its
full vocabulary, seven unroll steps, backward, clipping, AdamW. On a GPU it computes in bf16 over fp32 masters. All arms
run in one process, in turn, on the same numbers; medians. Tokens run 8 past the `length` slots that are trained: then
each slot counts at each unroll step, in SpecForge's arm too: that is asserted. With supervised=half, prompts and
answers of 256 to 1024 tokens (an eighth to a half of shorter rows) take turns. `sweep` adds rows of 1 x 8192, 16384 and
32768 (4, 8 and 16 times `length` for other shapes than qwen3-8b) and shares of supervised tokens.
"""

import gc
import importlib.util
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from torch import Tensor

from data_prep.supervision import supervised
from data_prep.teacher import chunk_rows, teacher_summary
from models.attention import Documents
from models.device import choose_device
from models.eagle3 import Eagle3, Eagle3Config
from models.target import Target
from models.vocab import VocabMap
from recipes.cli import told, words
from recipes.files import write_json
from recipes.schema import OBJECTIVES, EagleConfig, Recipe, UserError
from train.backend import make_optimizer
from train.objective import Inputs, UnrollLoss, select

STEPS, BEYOND = 7, 8  # unroll steps; tokens behind the trained slots
Step = Callable[[], Any]


@dataclass(frozen=True)
class Shape:
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head: int
    vocab: int
    kept: int


SHAPES = {
    "qwen3-8b": Shape(4096, 12288, 32, 8, 128, 151936, 32000),
    "smollm2": Shape(576, 1536, 9, 3, 64, 49152, 8192),
    "tiny": Shape(64, 192, 4, 2, 16, 1000, 256),
}


@dataclass(frozen=True)
class Case:
    """A batch: `rows` documents of `length` slots, of which about `share` are supervised."""

    rows: int
    length: int
    share: float = 1.0

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    def answers(self) -> Tensor:
        """Answer marks [rows, length + BEYOND]."""
        if self.share == 1:
            return torch.ones(self.rows, self.length + BEYOND, dtype=torch.int32)
        draw, low = random.Random(0), min(256, self.length // 8)
        rows = []
        for _ in range(self.rows):
            marks: list[int] = []
            while len(marks) < self.length + BEYOND:
                answer = draw.randint(low, 4 * low)
                marks += [0] * round(answer / self.share - answer) + [len(marks) + 1] * answer
            rows.append(marks[: self.length + BEYOND])
        return torch.tensor(rows, dtype=torch.int32)


class Frozen:
    """As much of a target as training asks for: its head and its embedding, random. The arg-max is always kept."""

    final_softcap = kernels = None

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype, self.vocab_size = device, dtype, shape.vocab
        source = torch.Generator(device).manual_seed(0)
        size = (shape.vocab, shape.hidden)
        self.head_weight, self.embed_weight = (
            (torch.randn(size, generator=source, device=device, dtype=dtype) * scale)
            for scale in (shape.hidden**-0.5, 1.0)
        )
        self.head_weight[shape.kept :] *= 0.05

    def logits(self, final: Tensor, head: Tensor | None = None) -> Tensor:
        return F.linear(final, self.head_weight if head is None else head)

    def embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.embed_weight)


@dataclass
class World:
    """What all arms share."""

    shape: Shape
    case: Case
    target: Frozen
    ids: Tensor  # [rows, length + BEYOND], on the host
    taps: Tensor  # [rows, length + BEYOND, 3H]
    final: Tensor  # [rows, length + BEYOND, H]

    @staticmethod
    def make(shape: Shape, case: Case, target: Frozen) -> "World":
        source = torch.Generator(target.device).manual_seed(1)
        long = (case.rows, case.length + BEYOND)
        taps, final = (
            torch.randn(*long, width, generator=source, device=target.device, dtype=target.dtype)
            for width in (3 * shape.hidden, shape.hidden)
        )
        return World(shape, case, target, torch.randint(0, shape.kept, long), taps, final)


def drafter_config(shape: Shape, positions: int) -> Eagle3Config:
    rope = {"rope_type": "default", "rope_theta": 1e6}
    sizes = (shape.hidden, shape.mlp, shape.heads, shape.kv_heads, shape.head)
    return Eagle3Config(*sizes, 1e-6, shape.vocab, shape.kept, positions, rope, (2, 18, 33), 36)


def ours(world: World, objective: str, recompute: bool) -> tuple[Step, list[int]]:
    """(a step, slots counted at each unroll step)."""
    shape, case, target = world.shape, world.case, cast(Target, world.target)
    vocab = VocabMap.from_ids(torch.arange(shape.kept), shape.vocab)
    torch.manual_seed(0)
    drafter = Eagle3(drafter_config(shape, case.length + 64), vocab).to(target.device)
    bf16 = target.dtype == torch.bfloat16
    loss = UnrollLoss(drafter, target, vocab, EagleConfig(objective=objective), bf16, recompute=recompute)
    cfg, cuda = Recipe().train, target.device.type == "cuda"
    optimizer, clip = make_optimizer(loss, cfg, fused=cuda), cfg.clip
    documents = Documents([case.length + BEYOND] * case.rows, target.device)
    inside = torch.arange(case.length + BEYOND) < case.length
    supervised_ST = (supervised(case.answers(), STEPS) & inside).flatten(1)
    teaches_T = torch.zeros(supervised_ST.shape[1], dtype=torch.bool)
    for i, supervised_T in enumerate(supervised_ST):
        teaches_T[1 + i :] |= supervised_T[: -1 - i]
    slots = select(world.ids.flatten(), supervised_ST, teaches_T.cumsum(0) - 1, documents)
    final_mH = world.final.flatten(0, 1)[teaches_T.to(target.device)]
    ids_T, there_ST = world.ids.flatten().to(target.device), supervised_ST.to(target.device)

    def inputs() -> Inputs:
        best_m, lse_m = teacher_summary(target, final_mH)
        taps_TC = world.taps.flatten(0, 1)
        return Inputs(ids_T, documents, there_ST, taps_TC, final_mH, loss.vocab.to_draft(best_m), lse_m, slots)

    def step() -> None:
        x = inputs()
        loss(x, loss.counts(x))[0].backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()

    return step, loss.counts(inputs()).tolist()


def specforge(world: World, backend: str, chunked: bool) -> tuple[Step, list[int]]:
    """The same of SpecForge 0.2: bf16 weights over fp32 masters in an optimiser of its own."""
    from specforge.algorithms.eagle3.model import OnlineEagle3Model
    from specforge.core.eagle3_adapters import SdpaLikeAdapter
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from specforge.optimizer import BF16Optimizer
    from transformers import LlamaConfig

    shape, case, target = world.shape, world.case, world.target
    counted: list[Tensor] = []

    class PastTheEnd(SdpaLikeAdapter):
        """Labels and masks run past the slots, as they do in a row that goes on."""

        def step_view(self, **given: Any) -> Any:
            state = super().step_view(**given)
            parts = {
                name: getattr(state, name)[:, : given["seq_length"]].contiguous()
                for name in ("input_ids", "position_mask", "loss_mask")
            }
            counted.append(parts["position_mask"].sum())
            return replace(state, **parts)

    config = LlamaConfig(
        hidden_size=shape.hidden, intermediate_size=shape.mlp, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, head_dim=shape.head, vocab_size=shape.vocab, num_hidden_layers=1,
        draft_vocab_size=shape.kept, max_position_embeddings=case.length + 64, rope_theta=1e6, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    draft = LlamaForCausalLMEagle3(config, attention_backend=backend)
    draft.t2d.copy_(torch.arange(shape.vocab) < shape.kept)
    draft.embed_tokens.weight = torch.nn.Parameter(target.embed_weight, requires_grad=False)
    model = OnlineEagle3Model(draft, STEPS, backend).to(target.device, target.dtype).train()
    model._make_adapter = lambda: PastTheEnd(model)
    optimizer = BF16Optimizer(draft, 1e-4, total_steps=1000)
    ids, taps = world.ids.to(target.device), world.taps[:, : case.length].contiguous()
    # a slot's own embedding and teacher are those of the position behind it
    fed, taught = F.pad(ids[:, 1:], (0, 1)), F.pad(world.final[:, 1:], (0, 0, 0, 1))
    mask = supervised(case.answers(), 1)[0].int().to(target.device).unsqueeze(-1)
    if case.share == 1:
        mask = torch.ones_like(mask)
    attention = torch.ones(case.rows, case.length, dtype=torch.bool, device=target.device)

    def run() -> Tensor:
        counted.clear()
        compact = {"target_hidden_for_compact": taught, "target_head_weight": target.head_weight}
        logits = None if chunked else target.logits(taught)
        losses, *_ = model(fed, attention, logits, mask, taps, **(compact if chunked else {}))
        return sum(0.8**i * loss for i, loss in enumerate(losses))

    def step() -> None:
        run().backward()
        optimizer.step()

    step()
    return step, [int(n) for n in counted]


def products(world: World) -> Step:
    """The matrix products alone: 7 layers and kept heads forward and backward, fc, the teacher's full head once."""
    s, n, target = world.shape, world.case.tokens, world.target
    layer = [(2 * s.hidden, s.heads * s.head), *[(2 * s.hidden, s.kv_heads * s.head)] * 2, (s.heads * s.head, s.hidden)]
    layer += [(s.hidden, s.mlp), (s.hidden, s.mlp), (s.mlp, s.hidden), (s.hidden, s.kept)]

    def make(*size: int) -> Tensor:
        return torch.randn(size, device=target.device, dtype=target.dtype)

    inputs = {width: make(n, width) for width in {w for pair in layer for w in pair} | {3 * s.hidden}}
    weights = {pair: make(*pair) for pair in {*layer, (3 * s.hidden, s.hidden)}}
    final = world.final[:, : world.case.length].flatten(0, 1)

    def step() -> None:
        for a, b in layer * STEPS:
            inputs[a] @ weights[a, b]
            inputs[b] @ weights[a, b].T
            inputs[a].T @ inputs[b]
        inputs[3 * s.hidden] @ weights[3 * s.hidden, s.hidden]
        inputs[3 * s.hidden].T @ inputs[s.hidden]
        for part in final.split(chunk_rows(s.vocab, target.device)):
            target.logits(part)

    return step


def attention(world: World) -> Step:
    """Causal attention alone, forward and backward, seven times."""
    s, case, target = world.shape, world.case, world.target
    shapes = [(case.rows, heads, case.length, s.head) for heads in (s.heads, s.kv_heads, s.kv_heads)]
    q, k, v = (torch.randn(x, device=target.device, dtype=target.dtype, requires_grad=True) for x in shapes)
    out_shape = torch.randn(shapes[0], device=target.device, dtype=target.dtype)

    def step() -> None:
        for _ in range(STEPS):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            torch.autograd.grad(out, (q, k, v), out_shape)

    return step


def measure(steps: dict[str, Step], own: dict[str, int], shared: int, rounds: int, warm: int, cuda: bool) -> Any:
    """Of each arm its median milliseconds a step and its peak memory: what it and all arms hold, what a step adds."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    peak = dict.fromkeys(steps, 0)
    for turn in range(warm + rounds):
        for name, step in steps.items():
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            begin = time.perf_counter()
            step()
            if cuda:
                torch.cuda.synchronize()
                peak[name] = max(peak[name], torch.cuda.max_memory_allocated() - before + own[name] + shared)
            if turn >= warm:
                times[name].append(time.perf_counter() - begin)
    return {
        name: {
            "ms": round(1e3 * statistics.median(of_arm), 3),
            "low_high": [round(1e3 * min(of_arm), 3), round(1e3 * max(of_arm), 3)],
            "peak_gib": round(peak[name] / 2**30, 2) if cuda else None,
        }
        for name, of_arm in times.items()
    }


def bench(options: dict[str, str], shape: Shape, case: Case, arms: list[str]) -> dict[str, Any]:
    device = choose_device(options["device"])
    cuda = device.type == "cuda"
    held = torch.cuda.memory_allocated if cuda else lambda: 0
    target = Frozen(shape, device, torch.bfloat16 if cuda or options["dtype"] == "bf16" else torch.float32)
    world = World.make(shape, case, target)
    shared, steps, own, counts = held(), {}, {}, {}
    for arm in arms:
        before = held()
        if arm == "ours":
            steps[arm], counts[arm] = ours(world, options["objective"], options["recompute"] == "true")
        elif arm == "specforge":
            chunked = options["specforge_chunked"] == "true"
            steps[arm], counts[arm] = specforge(world, options["backend"], chunked)
        else:
            steps[arm] = {"products": products, "attention": attention}[arm](world)
        own[arm] = held() - before
    if case.share == 1:
        for arm, counted in counts.items():
            if counted != [case.tokens] * STEPS:
                raise UserError(f"{arm} counts {counted} slots, not {case.tokens} at each unroll step")
    found = measure(steps, own, shared, int(options["rounds"]), int(options["warm"]), cuda)
    return {"case": asdict(case), "slots": counts, "arms": found}


def show(result: dict[str, Any]) -> None:
    case, arms = Case(**result["case"]), result["arms"]
    every = STEPS * case.tokens
    slots = ", ".join(f"{arm} {sum(n):,} ({sum(n) / every:.1%})" for arm, n in result["slots"].items())
    print(f"\n{case.rows} x {case.length} tokens; slots trained, of all unroll steps: {slots}")
    print(f"{'arm':>12}{'ms':>11}{'tokens/s':>12}{'peak GiB':>10}{'of ours':>9}")
    own = arms.get("ours", {"ms": None})["ms"]
    for arm, f in arms.items():
        ratio = f"{f['ms'] / own:.2f}" if own else ""
        print(f"{arm:>12}{f['ms']:>11,.2f}{1e3 * case.tokens / f['ms']:>12,.0f}{f['peak_gib'] or '-':>10}{ratio:>9}")
    if {"ours", "products", "attention"} <= arms.keys():
        bare = arms["products"]["ms"] + arms["attention"]["ms"]
        print(f"bare products and attention over ours: {bare / own:.3f}", flush=True)


def main(argv: list[str]) -> None:
    gpu = torch.cuda.is_available()
    options = {
        "shapes": "qwen3-8b" if gpu else "tiny", "rows": "4", "length": "2048" if gpu else "128", "supervised": "all",
        "rounds": "10", "warm": "3", "arms": "ours,specforge,products,attention", "sweep": "false", "out": "",
        "recompute": "false", "device": "auto", "dtype": "auto", "objective": "soft_ce", "specforge_chunked": "true",
        "backend": "flex_attention" if gpu else "sdpa",
    }  # fmt: skip
    flags = dict.fromkeys(("sweep", "recompute", "specforge_chunked"), ("true", "false"))
    choices = {"shapes": [*SHAPES], "supervised": ("all", "half"), "dtype": ("auto", "bf16", "fp32"), **flags}
    choices |= {"objective": OBJECTIVES, "arms": options["arms"].split(",")}
    options = words(argv, options, str(__doc__), choices, "rows length rounds")
    there = importlib.util.find_spec("specforge") is not None
    arms = [arm for arm in options["arms"].split(",") if arm != "specforge" or there]
    if not there and "specforge" in options["arms"]:
        print("specforge is not installed: without its arm")
    device, shape = choose_device(options["device"]), SHAPES[options["shapes"]]
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    interpreted = ", kernels interpreted" if os.environ.get("TRITON_INTERPRET") == "1" else ""
    print(f"{card}{interpreted}, torch {torch.__version__}, shapes {options['shapes']}", flush=True)
    rows, length = int(options["rows"]), int(options["length"])
    cases = [(Case(rows, length, 0.5 if options["supervised"] == "half" else 1.0), arms)]
    if options["sweep"] == "true":
        longer = [8192 * k if options["shapes"] == "qwen3-8b" else 4 * length * k for k in (1, 2, 4)]
        cases += [(Case(1, n), ["ours"]) for n in longer]
        cases += [(Case(rows, length, share), ["ours"]) for share in (1.0, 0.5, 0.25)]
    results = []
    for case, wanted in cases:
        results.append(bench(options, shape, case, wanted))
        show(results[-1])
        gc.collect()  # SpecForge's model and its adapter hold each other
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if options["out"]:
        write_json(Path(options["out"]), {"hardware": card, "torch": torch.__version__, **options, "results": results})
        print(json.dumps({"written": options["out"]}))


if __name__ == "__main__":
    told(lambda: main(sys.argv[1:]))
