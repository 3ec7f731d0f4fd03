"""What a training will take, from the recipe and the target's config alone: nothing is loaded, converted or kept."""

from math import ceil
from typing import Any

import torch

from data_prep.probe import target_config, training_dtype
from models.device import choose_device
from models.flexdraft import default_layers
from recipes.schema import EagleConfig, Recipe
from train.fused_loss import CHUNK_CPU, CHUNK_GPU
from train.head_loss import CHUNK

UNKNOWN = "  drafter and memory: not known before the target is fetched"


def use_bf16(recipe: Recipe, device: torch.device) -> bool:
    """Whether the step computes in bf16 (masters stay fp32)."""
    return training_dtype(recipe, device) == torch.bfloat16


def kept_features(recipe: Recipe) -> int:
    """Bytes of the target's features that a run may keep: on a CPU, where rows may come a second time."""
    again = (recipe.train.epochs > 1 or recipe.train.max_steps > 0) and recipe.data.states == "none"
    return recipe.train.keep_features_mb * 2**20 if again and choose_device(recipe.device).type == "cpu" else 0


def parameters(config: dict[str, Any], eagle: EagleConfig, taps: int) -> int:
    """Trained parameters of an Eagle3 for a target with this config."""
    hidden, heads, kv, head = _heads(config)
    attention = 2 * hidden * (heads + 2 * kv) * head + heads * head * hidden
    whole = int(config["vocab_size"])
    vocab = min(eagle.draft_vocab or whole, whole)
    gains = (4 + taps * (eagle.fc_norm or eagle.norm_before_fc)) * hidden + 2 * head * eagle.qk_norm
    return hidden * (taps * hidden + 3 * int(config["intermediate_size"]) + vocab) + attention + gains


def activations(config: dict[str, Any], recipe: Recipe, wide: int) -> int:
    """Bytes that a micro-batch holds for its backward when all its slots are supervised, `wide` bytes a number.

    By slot and unroll step: state and residual, queries and the attention's output, keys and values, gate and up,
    rotation; in fp32 also what models/lean.py makes again in half precision. With train.recompute what goes into a
    step and the keys and values, and one step whole. Once: embeddings, and what they say. For the head: the states of
    all steps, their gradient.
    """
    hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    heads, steps = int(config["num_attention_heads"]), recipe.eagle.unroll_steps
    kv, head = int(config.get("num_key_value_heads") or heads), int(config.get("head_dim") or hidden // heads)
    step = 2 * hidden + 2 * (heads + kv + 1) * head + 2 * inner + (0 if wide == 2 else 2 * hidden + 2 * inner)
    said = (heads + 2 * kv) * head
    every = steps * (hidden + said + 2 * (kv + 1) * head) + step if recipe.train.recompute else steps * step
    once = 2 * hidden + said
    return recipe.train.micro_batch_tokens * wide * (every + once + (2 if wide == 2 else 3) * steps * hidden)


def training_cost(recipe: Recipe, prompts: int) -> str:
    """Upper bounds in words; `prompts` as data_prep.sources counts them."""
    t, taps = recipe.train, len(recipe.target.taps) or 3
    found = target_config(recipe.target)
    if found is None:
        return "\n".join([*_steps(recipe, prompts), UNKNOWN])
    config = found.to_dict()
    size = parameters(config, recipe.eagle, taps)
    device = choose_device(recipe.device)
    wide = _width(recipe)
    chunk = 2 * wide * (CHUNK_GPU if device.type == "cuda" else CHUNK_CPU)  # logits, the teacher's, a working copy
    features = t.batch_tokens * (taps + 1) * int(config["hidden_size"]) * wide
    copies = size * wide if wide == 2 else 0  # what autocast computes with
    held = activations(config, recipe, wide) + features + chunk + copies
    memory = 16 * size + held + kept_features(recipe)
    return "\n".join([*_steps(recipe, prompts), *_sizes(recipe, size, memory)])


def flexdraft_cost(recipe: Recipe, prompts: int) -> str:
    """The same of a FlexDraft."""
    t, flex, found = recipe.train, recipe.flex, target_config(recipe.target)
    if found is None:
        return "\n".join([*_steps(recipe, prompts), UNKNOWN])
    config = found.to_dict()
    hidden, heads, kv, head = _heads(config)
    layers = flex.layers or default_layers(int(config["num_hidden_layers"]))
    size = hidden + layers * 2 * hidden * (heads + kv) * head
    if flex.parametrisation == "lora":
        size = hidden + layers * 2 * flex.lora_rank * (2 * hidden + (heads + kv) * head)
    if flex.parametrisation == "layers":
        size += layers * (3 * int(config["intermediate_size"]) + 2) * hidden
    rows = ceil(t.micro_batch_tokens / recipe.data.max_length) * flex.anchors * flex.block_size
    # of each mask in each tuned layer, about what its backward needs: five states, three of the feed-forward block
    masks = layers * rows * (5 * hidden + 3 * int(config["intermediate_size"])) * _width(recipe)
    keys = t.batch_tokens * layers * 2 * kv * head * _width(recipe)
    logits = _chunk(recipe, int(config["vocab_size"]))
    return "\n".join([*_steps(recipe, prompts), *_sizes(recipe, size, 16 * size + masks + keys + logits)])


def calibrator_cost(recipe: Recipe, prompts: int) -> str:
    """The same of a calibrator."""
    found = target_config(recipe.target)
    if found is None:
        return "\n".join([*_steps(recipe, prompts), UNKNOWN])
    config, rank = found.to_dict(), recipe.flex.calibrator_rank
    hidden, vocab = int(config["hidden_size"]), int(config["vocab_size"])
    size = rank * (2 * hidden + 1 + vocab) + vocab
    return "\n".join([*_steps(recipe, prompts), *_sizes(recipe, size, 16 * size + _chunk(recipe, vocab))])


def _chunk(recipe: Recipe, vocab: int) -> int:
    """Bytes of the logits that train/head_loss.py holds at once: the masks', the teacher's, a working copy."""
    cuda = choose_device(recipe.device).type == "cuda"
    return 3 * 4 * max(CHUNK_GPU if cuda else CHUNK, vocab)


def _heads(config: dict[str, Any]) -> tuple[int, int, int, int]:
    """Hidden size, query heads, key-value heads, head size."""
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    kv = int(config.get("num_key_value_heads") or heads)
    return hidden, heads, kv, int(config.get("head_dim") or hidden // heads)


def _width(recipe: Recipe) -> int:
    """Bytes of a number in the training step."""
    return 2 if use_bf16(recipe, choose_device(recipe.device)) else 4


def _steps(recipe: Recipe, prompts: int) -> list[str]:
    t, length = recipe.train, recipe.data.max_length
    steps = t.max_steps or t.epochs * ceil(prompts * length / t.batch_tokens)
    return [
        "training will cost (upper bounds):",
        f"  {prompts:,} rows of at most {length:,} tokens, {steps:,} steps of about {t.batch_tokens:,} tokens",
    ]


def _sizes(recipe: Recipe, size: int, memory: int) -> list[str]:
    return [
        f"  drafter: {size:,} trained parameters ({16 * size / 1e9:,.2f} GB with gradients and AdamW's state)",
        f"  memory: about {memory / 1e9:,.2f} GB on one process, beside the target",
        f"  disk: {12 * size / 1e9:,.2f} GB a checkpoint, {recipe.train.keep} kept besides the best",
    ]
