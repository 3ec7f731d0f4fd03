"""What a training will take, from the recipe and the target's config alone: nothing is loaded, converted or kept."""

import importlib.util
from math import ceil
from pathlib import Path
from typing import Any

import torch

from data_prep.answers import generation_dtype
from models.target import choose_device
from recipes.schema import Recipe


def use_bf16(recipe: Recipe, device: torch.device) -> bool:
    """Whether the step computes in bf16 (masters stay fp32); `fast` asks a short timed product on a CPU."""
    chosen = recipe.train.precision
    if chosen == "fast":
        return generation_dtype("auto", device) == torch.bfloat16
    return device.type == "cuda" if chosen == "auto" else chosen == "bf16"


def kept_features(recipe: Recipe) -> int:
    """Bytes of the target's features that a run may keep: on a CPU, where rows may come a second time."""
    again = recipe.train.epochs > 1 or recipe.train.max_steps > 0
    return recipe.train.keep_features_mb * 2**20 if again and choose_device(recipe.device).type == "cpu" else 0


def target_config(path: str) -> dict[str, Any] | None:
    """The text config of a folder, a GGUF file or a hub id (its config.json alone is fetched); None if out of reach."""
    from transformers import AutoConfig

    if path.startswith("package:"):
        package, _, file = path.removeprefix("package:").partition("/")
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            return None
        path = str(Path(spec.submodule_search_locations[0]) / file)
    gguf = Path(path).expanduser()
    options = {"gguf_file": gguf.name} if gguf.suffix == ".gguf" else {}
    try:
        config = AutoConfig.from_pretrained(gguf.parent if options else path, **options)
    except (OSError, ValueError):
        return None
    found: dict[str, Any] = config.get_text_config().to_dict()
    return found


def parameters(config: dict[str, Any], draft_vocab: int, taps: int) -> int:
    """Trained parameters of an Eagle3 for a target with this config."""
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    kv = int(config.get("num_key_value_heads") or heads)
    head = int(config.get("head_dim") or hidden // heads)
    attention = 2 * hidden * (heads + 2 * kv) * head + heads * head * hidden
    vocab = draft_vocab or int(config["vocab_size"])
    return hidden * (taps * hidden + 3 * int(config["intermediate_size"]) + vocab + 4) + attention


def training_cost(recipe: Recipe, prompts: int) -> str:
    """Upper bounds in words; `prompts` as data_prep.sources counts them."""
    t, data, taps = recipe.train, recipe.data, len(recipe.target.taps) or 3
    tokens = prompts * data.max_length
    steps = t.max_steps or t.epochs * ceil(tokens / t.batch_tokens)
    lines = [
        "training will cost (upper bounds):",
        f"  {prompts:,} rows of at most {data.max_length:,} tokens, {steps:,} steps of about {t.batch_tokens:,} tokens",
    ]
    config = target_config(recipe.target.path)
    if config is None:
        return "\n".join([*lines, "  drafter and memory: not known before the target is fetched"])
    size = parameters(config, recipe.eagle.draft_vocab, taps)
    wide = 2 if use_bf16(recipe, choose_device(recipe.device)) else 4
    # one gradient of the logits for each unroll step, the teacher's, and a working copy
    logits = (recipe.eagle.unroll_steps + 2) * t.micro_batch_tokens * wide
    logits *= recipe.eagle.draft_vocab or int(config["vocab_size"])
    features = t.batch_tokens * (taps + 1) * int(config["hidden_size"]) * wide
    memory = (16 * size + logits + features + kept_features(recipe)) / 1e9
    return "\n".join(
        [
            *lines,
            f"  drafter: {size:,} trained parameters ({16 * size / 1e9:,.2f} GB with gradients and AdamW's state)",
            f"  memory: about {memory:,.2f} GB on one process, beside the target and the layer's activations",
            f"  disk: {12 * size / 1e9:,.2f} GB a checkpoint, {t.keep} kept besides the best",
        ]
    )
