"""What a training will take, from the recipe and the target's config alone: nothing is loaded, converted or kept."""

from math import ceil
from typing import Any

import torch

from data_prep.probe import target_config, training_dtype
from models.target import choose_device
from recipes.schema import EagleConfig, Recipe
from train.fused_loss import CHUNK_CPU, CHUNK_GPU


def use_bf16(recipe: Recipe, device: torch.device) -> bool:
    """Whether the step computes in bf16 (masters stay fp32)."""
    return training_dtype(recipe, device) == torch.bfloat16


def kept_features(recipe: Recipe) -> int:
    """Bytes of the target's features that a run may keep: on a CPU, where rows may come a second time."""
    again = (recipe.train.epochs > 1 or recipe.train.max_steps > 0) and recipe.data.states == "none"
    return recipe.train.keep_features_mb * 2**20 if again and choose_device(recipe.device).type == "cpu" else 0


def parameters(config: dict[str, Any], eagle: EagleConfig, taps: int) -> int:
    """Trained parameters of an Eagle3 for a target with this config."""
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    kv = int(config.get("num_key_value_heads") or heads)
    head = int(config.get("head_dim") or hidden // heads)
    attention = 2 * hidden * (heads + 2 * kv) * head + heads * head * hidden
    vocab = eagle.draft_vocab or int(config["vocab_size"])
    gains = (4 + taps * (eagle.fc_norm or eagle.norm_before_fc)) * hidden + 2 * head * eagle.qk_norm
    return hidden * (taps * hidden + 3 * int(config["intermediate_size"]) + vocab) + attention + gains


def activations(config: dict[str, Any], recipe: Recipe, wide: int) -> int:
    """Bytes that a micro-batch holds for its backward when all its slots are supervised, `wide` bytes a number.

    By slot and unroll step: state, embedding and residual, queries and the attention's output, keys and values, gate
    and up, rotation; in fp32 also what models/lean.py makes again in half precision. With train.recompute what goes
    into a step and the keys and values, and one step whole. For the head: the states of all steps, their gradient.
    """
    hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    heads, steps = int(config["num_attention_heads"]), recipe.eagle.unroll_steps
    kv, head = int(config.get("num_key_value_heads") or heads), int(config.get("head_dim") or hidden // heads)
    step = 3 * hidden + 2 * (heads + kv + 1) * head + 2 * inner + (0 if wide == 2 else 3 * hidden + 2 * inner)
    every = steps * (2 * hidden + 2 * (kv + 1) * head) + step if recipe.train.recompute else steps * step
    return recipe.train.micro_batch_tokens * wide * (every + (2 if wide == 2 else 3) * steps * hidden)


def training_cost(recipe: Recipe, prompts: int) -> str:
    """Upper bounds in words; `prompts` as data_prep.sources counts them."""
    t, data, taps = recipe.train, recipe.data, len(recipe.target.taps) or 3
    tokens = prompts * data.max_length
    steps = t.max_steps or t.epochs * ceil(tokens / t.batch_tokens)
    lines = [
        "training will cost (upper bounds):",
        f"  {prompts:,} rows of at most {data.max_length:,} tokens, {steps:,} steps of about {t.batch_tokens:,} tokens",
    ]
    found = target_config(recipe.target)
    if found is None:
        return "\n".join([*lines, "  drafter and memory: not known before the target is fetched"])
    config = found.to_dict()
    size = parameters(config, recipe.eagle, taps)
    device = choose_device(recipe.device)
    wide = 2 if use_bf16(recipe, device) else 4
    chunk = 2 * wide * (CHUNK_GPU if device.type == "cuda" else CHUNK_CPU)  # logits, the teacher's, a working copy
    features = t.batch_tokens * (taps + 1) * int(config["hidden_size"]) * wide
    copies = size * wide if wide == 2 else 0  # what autocast computes with
    held = activations(config, recipe, wide) + features + chunk + copies
    memory = (16 * size + held + kept_features(recipe)) / 1e9
    return "\n".join(
        [
            *lines,
            f"  drafter: {size:,} trained parameters ({16 * size / 1e9:,.2f} GB with gradients and AdamW's state)",
            f"  memory: about {memory:,.2f} GB on one process, beside the target",
            f"  disk: {12 * size / 1e9:,.2f} GB a checkpoint, {t.keep} kept besides the best",
        ]
    )
