"""What preparing the data and training will take on this device, before any weight is loaded.

One decoder layer and one output head of the target's shape, randomly initialised, are timed for ten seconds at most;
the rest is arithmetic on the recipe's upper bounds.
"""

import importlib.util
import statistics
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from data_prep.local import generation_dtype
from models.capture import Steps
from models.device import choose_device
from models.sampling import draw, law, uniforms
from models.source import Source
from models.target import Target
from recipes.files import cache_dir, user_path
from recipes.schema import Recipe, TargetConfig

SECONDS = 10.0  # of all timings together
HEAD_ROWS = 32768  # vocabulary of the timed head, at most; the time is scaled to the target's
CACHE_BYTES = {
    "cuda": 4 << 30,
    "cpu": 256 << 20,
}  # of the timed layer's cache, at most; the time is scaled to the slots
FORWARD_TOKENS = {"cuda": 8192, "cpu": 1024}
BACKWARD = 3  # a forward and a backward cost about three forwards


@dataclass(frozen=True)
class Probe:
    """Seconds, all layers of the target counted."""

    step: float  # one decoding step of all slots, the likeliest token chosen
    draw: float  # what drawing the tokens from their laws adds to it
    token: float  # a token in a forward over many (prefill, the teacher's pass), the head left out
    layer_token: float  # the same, of one layer, in the precision of training
    head_token: float  # of the whole vocabulary's logits, in the precision of training
    spent: float


@dataclass(frozen=True)
class Load:
    """Upper bounds of what there is to do, in tokens but for the rows."""

    rows: int
    written: int  # questions by the target, those that fall included
    asked: int  # what the target reads before it answers
    answered: int  # answers by the target
    kept: int  # answers that the data came with


def target_config(target: TargetConfig) -> Any:
    """transformers' text config of a folder, a GGUF file or a hub id (its config.json alone is fetched); None if out of
    reach."""
    from transformers import AutoConfig

    folder, path = folder_at_hand(target), target.path
    if folder is None and path.startswith("package:"):
        package, _, file = path.removeprefix("package:").partition("/")
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            return None
        path = str(Path(spec.submodule_search_locations[0]) / file)
    gguf = folder or user_path(path)
    options = {"gguf_file": gguf.name} if gguf.suffix == ".gguf" else {}
    try:
        return AutoConfig.from_pretrained(gguf.parent if options else folder or path, **options).get_text_config()
    except (OSError, ValueError):
        return None


def folder_at_hand(target: TargetConfig) -> Path | None:
    """Where the target's config and tokenizer lie ready: its own folder, or what its GGUF file was converted to."""
    for folder in (user_path(target.path), cache_dir("targets", target.sha256[:16] or "none")):
        if (folder / "config.json").is_file():
            return folder
    return None


def training_dtype(recipe: Recipe, device: torch.device) -> torch.dtype:
    """What the training step computes in (masters stay fp32); `fast` asks a short timed product on a CPU."""
    chosen = recipe.train.precision
    if chosen == "fast":
        return generation_dtype("auto", device)
    bf16 = device.type == "cuda" if chosen == "auto" else chosen == "bf16"
    return torch.bfloat16 if bf16 else torch.float32


def probe(recipe: Recipe, config: Any, context: int) -> Probe:
    """Time one layer and head of the target's shape; `context`: tokens that a row holds on average while it decodes."""
    device, began = choose_device(recipe.device), time.perf_counter()
    dtypes = generation_dtype(recipe.data.dtype, device), training_dtype(recipe, device)
    layers, share = config.num_hidden_layers, SECONDS / 4
    target = _one_layer(config, device, dtypes[0], context)
    step = _decoding(target, recipe.data.slots, context, share)
    choosing, drawing = _choosing(target, recipe.data.slots, config.vocab_size, share)
    token = _forward(target, recipe.data.max_length, share / 2)
    trained = target if dtypes[1] == dtypes[0] else _one_layer(config, device, dtypes[1], context)
    layer_token = _forward(trained, recipe.data.max_length, share / 2)
    states = torch.randn(256, trained.hidden_size, device=device, dtype=trained.dtype)
    head = _median(lambda: trained.logits(states), device, share / 2) / 256 * config.vocab_size / trained.vocab_size
    spent = time.perf_counter() - began
    return Probe(layers * step + choosing, drawing, layers * token, layer_token, head, spent)


def expected(recipe: Recipe, load: Load) -> list[str]:
    """Lines for a person."""
    config, data, train = target_config(recipe.target), recipe.data, recipe.train
    answers = load.answered + load.kept
    tokens = min(load.asked + answers, load.rows * data.max_length)
    share = min(1.0, answers / max(1, tokens))
    rows = f"{load.rows:,} rows, at most {tokens:,} tokens, {share:.0%} of them answers"
    if config is None:
        return [rows, "the time is not known before the target's config can be read"]
    found = probe(recipe, config, min(data.max_length, (load.asked + answers // 2) // max(1, load.rows) + 1))
    device = choose_device(recipe.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    lines = [rows, f"on this device ({name}; one random layer and head timed for {found.spent:.0f} s, and scaled):"]
    if data.server.url:
        lines.append("  questions and answers: as fast as the server is")
    else:
        slots = max(1, min(data.slots, load.rows))
        drawn, answered = found.step + found.draw, found.step + (found.draw if any(data.temperatures) else 0.0)
        lines.append(f"  questions: {_clock(load.written * drawn / slots)}")
        answering = load.answered * answered / slots + load.asked * found.token
        lines.append(f"  answers: {_clock(answering)}, {slots / answered:,.0f} tokens/s while all slots are busy")
    trained = train.epochs * tokens
    if train.max_steps:
        trained = min(trained, train.max_steps * train.batch_tokens)
    # on a CPU the target's features are kept from the first epoch on; those on disk are of all rows
    taught = min(trained, tokens) if device.type == "cpu" and train.keep_features_mb else trained
    taught = taught if data.states == "none" else tokens
    kept_vocab = min(1.0, (recipe.eagle.draft_vocab or config.vocab_size) / config.vocab_size)
    passes = BACKWARD * recipe.eagle.unroll_steps
    drafter = passes * _wider(config) * found.layer_token + (passes + 1) * share * kept_vocab * found.head_token
    teacher = config.num_hidden_layers * found.layer_token + share * found.head_token
    training = taught * teacher + trained * drafter
    lines.append(f"  training: {_clock(training)}, {trained / max(training, 1e-9):,.0f} tokens/s")
    return [*lines, "  (each for the longest answers that the recipe allows)"]


def _one_layer(config: Any, device: torch.device, dtype: torch.dtype, longest: int) -> Target:
    from transformers import AutoModelForCausalLM

    small = deepcopy(config)
    small.num_hidden_layers, small.vocab_size = 1, min(HEAD_ROWS, config.vocab_size)
    small.pad_token_id = None  # it may lie outside of the smaller vocabulary
    if getattr(config, "layer_types", None):
        small.layer_types = config.layer_types[:1]
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(small, dtype=dtype)
    return Target(model, None, Source("probe", Path(), "", 1, frozenset(), ""), taps=[0])


def _decoding(target: Target, slots: int, context: int, seconds: float) -> float:
    """One layer's part of a decoding step of all slots."""
    device, bytes_a_row = target.device, 2 * target.n_kv * target.head_dim * target.dtype.itemsize * (context + 64)
    rows = max(1, min(slots, CACHE_BYTES[device.type] // bytes_a_row))
    cache, captured = target.new_cache(rows, context + 64), Steps(device)
    cache.set_lengths([context - i % 2 for i in range(rows)])  # rows of different lengths, as they are in generation
    if captured.captures:
        cache.bucket = cache.capacity
    ids = torch.ones(rows, 1, dtype=torch.int64, device=device)
    once = _median(lambda: captured.run("step", lambda: target.forward(ids, cache)), device, seconds)
    return once * slots / rows


def _choosing(target: Target, slots: int, vocab_size: int, seconds: float) -> tuple[float, float]:
    """The head's part of a decoding step of all slots with the likeliest tokens chosen; what drawing them adds."""
    device = target.device
    rows = max(1, min(slots, CACHE_BYTES[device.type] // (64 * target.vocab_size)))
    states = torch.randn(rows, target.hidden_size, device=device, dtype=target.dtype)
    places, scale = torch.arange(rows, device=device), slots / rows * vocab_size / target.vocab_size
    logits = target.logits(states)
    likeliest = _median(lambda: target.logits(states).argmax(-1), device, seconds / 2)
    drawn = _median(lambda: draw(law(logits, 1.0), uniforms(0, places, places)), device, seconds / 2)
    return likeliest * scale, drawn * scale


def _forward(target: Target, max_length: int, seconds: float) -> float:
    """One layer's time a token, in a forward over rows of the recipe's length."""
    tokens = FORWARD_TOKENS[target.device.type]
    length = min(max_length, tokens, target.max_positions)
    ids = torch.ones(max(1, tokens // length), length, dtype=torch.int64, device=target.device)
    return _median(lambda: target.features(ids), target.device, seconds) / ids.numel()


def _median(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Median time of one call, over as many as fit and 20 at most, after two that warm up."""
    end, times = time.perf_counter() + seconds, list[float]()
    for _ in range(22):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        if len(times) > 3 and time.perf_counter() > end:
            break
    return statistics.median(times[2:])


def _wider(config: Any) -> float:
    """The drafter's layer over one of the target's, in weights: its projections read two states side by side."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    kv = getattr(config, "num_key_value_heads", None) or heads
    head = getattr(config, "head_dim", None) or hidden // heads
    reads, rest = hidden * (heads + 2 * kv) * head, heads * head * hidden + 3 * hidden * config.intermediate_size
    return (2 * reads + rest) / (reads + rest)


def _clock(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
