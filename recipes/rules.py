"""What values the recipe's keys may have: everything that can be refused before anything is loaded or looked up."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from recipes.schema import (
    BLOCK_SIZES,
    DECODERS,
    DTYPES,
    KINDS,
    NORMALISERS,
    OBJECTIVES,
    VERIFIERS,
    Recipe,
    SourceConfig,
    UserError,
    did_you_mean,
)

# What `validate` asks of single keys; rules that join several are in it.
CHOICES: dict[str, tuple[str, ...]] = {
    "device": ("auto", "cpu", "cuda"),
    "target.dtype": DTYPES,
    "target.shard": ("auto", "always", "never"),
    "data.dtype": DTYPES,
    "eval.dtype": DTYPES,
    "data.states": ("none", "bf16", "fp8"),
    "eagle.init_vocab": ("keep", "replace"),
    "flex.loss": ("soft", "hard"),
    "flex.parametrisation": ("full", "lora", "layers"),
    "eval.graft_fill": ("auto", "always"),
    "eval.flex_mode": ("auto", "parallel", "sequential"),
    "eagle.objective": OBJECTIVES,
    "eagle.normaliser": NORMALISERS,
    "train.precision": ("auto", "fp32", "bf16", "fast"),
    "train.tracker": ("wandb", "none"),
    "decoder": ("", *DECODERS),
    "eval.verifier": ("auto", *VERIFIERS),
}
AT_LEAST_ONE = {
    "data": ("max_length", "answer_tokens", "slots", "validation_rows"),
    "data.server": ("concurrency",),
    "eagle": ("unroll_steps",),
    "flex": ("anchors", "calibrator_rank", "lora_rank"),
    "train": ("epochs", "batch_tokens", "micro_batch_tokens", "save_every", "keep", "log_every"),
    "eval": ("max_new_tokens", "batch_size", "chain_length", "depth", "branch", "nodes", "max_prompt", "paths"),
}
AT_MOST = {"depth": 16, "chain_length": 16, "branch": 64, "nodes": 1024, "temperature": 10, "paths": 16}  # of eval
AT_LEAST_ZERO = {
    "data.server": ("requests_per_minute",),
    "eagle": ("draft_vocab", "lk_decay"),
    "flex": ("layers",),
    "train": ("max_steps", "weight_decay", "keep_features_mb"),
    "eval": ("limit", "temperature", "top_k"),
}


def validate(recipe: Recipe) -> None:
    """Refuse values that no command could honour, all of them in one message; nothing is loaded or looked up."""
    wrong = [f"  {key}={_value(recipe, key)!r}: must be {rule}" for key, rule in _broken_rules(recipe)]
    for name, source in recipe.data.sources.items():
        broken = _broken_source_rules(source)
        wrong += [f"  data.sources.{name}.{key}={getattr(source, key)!r}: must be {rule}" for key, rule in broken]
    if wrong:
        raise UserError("\n".join([f"recipe {recipe.recipe}:", *wrong]))


def _broken_rules(r: Recipe) -> list[tuple[str, str]]:
    rules = [(key, _one_of([_value(r, key)], known), _value(r, key) in known) for key, known in CHOICES.items()]
    for least, groups in ((1, AT_LEAST_ONE), (0, AT_LEAST_ZERO)):
        keys = [f"{group}.{leaf}" for group, leaves in groups.items() for leaf in leaves]
        rules += [(key, f"{least} or more", _value(r, key) >= least) for key in keys]
    t, e, gates = r.train, r.eval, r.eval.gates
    rules += [(f"eval.{key}", f"at most {most}", getattr(e, key) <= most) for key, most in AT_MOST.items()]
    rules += [(key, "a finite number", math.isfinite(number)) for key, number in _numbers(dataclasses.asdict(r))]
    rules += [
        ("seed", "0 or more, and under 2^63", 0 <= r.seed < 2**63),
        ("train.learning_rate", "above 0", t.learning_rate > 0),
        ("train.clip", "above 0", t.clip > 0),
        ("train.spike", "0 (never stop) or above 1", t.spike == 0 or t.spike > 1),
        ("train.warmup", "from 0 up to 1", 0 <= t.warmup < 1),
        ("train.min_lr", "from 0 to 1", 0 <= t.min_lr <= 1),
        ("train.betas", "two numbers from 0 up to 1", len(t.betas) == 2 and all(0 <= b < 1 for b in t.betas)),
        ("eagle.step_decay", "above 0 and at most 1", 0 < r.eagle.step_decay <= 1),
        ("eagle.lk_scale", "from 0 to 1", 0 <= r.eagle.lk_scale <= 1),
        ("eagle.norm_before_fc", "false beside eagle.fc_norm", not (r.eagle.norm_before_fc and r.eagle.fc_norm)),
        ("flex.block_size", "from 2 (a mask drafts nothing alone) to 64", r.flex.block_size in BLOCK_SIZES),
        ("eval.flex_threshold", "from 0 (all drafts) to 1", 0 <= e.flex_threshold <= 1),
        ("flex.gamma", "above 0", r.flex.gamma > 0),
        ("eval.top_p", "above 0 and at most 1", 0 < e.top_p <= 1),
        ("eval.draft_top_p", "above 0 and at most 1", 0 < e.draft_top_p <= 1),
        ("eval.draft_temperature", "0 to 10, or empty", 0 <= (e.draft_temperature or 0) <= 10),
        ("eval.lossless", "-1 (none), 0 (all) or a number of prompts", e.lossless >= -1),
        ("eval.gates", "three numbers from 0 to 1, or none", len(gates) in (0, 3) and all(0 <= g <= 1 for g in gates)),
        ("eval.decoders", _one_of(e.decoders, DECODERS, "some"), bool(e.decoders) and {*e.decoders} <= {*DECODERS}),
        ("eval.batch_sizes", "numbers of 1 or more", all(size >= 1 for size in e.batch_sizes)),
        (
            "eval.matrix",
            "cold, carried or warm-N, or a FILE.safetensors",
            re.fullmatch(r"cold|carried|warm-\d+|.+\.safetensors", e.matrix) is not None,
        ),
        ("data.temperatures", "numbers from 0 up", bool(r.data.temperatures) and min(r.data.temperatures) >= 0),
        ("data.server.url", "a web address", re.fullmatch(r"|https?://[^/\s]+\S*", r.data.server.url) is not None),
        ("data.server.timeout", "above 0", r.data.server.timeout > 0),
        ("rows", "1 or more", r.rows >= 1),
    ]
    return [(key, rule) for key, rule, holds in rules if not holds]


def _broken_source_rules(source: SourceConfig) -> list[tuple[str, str]]:
    by_itself = source.kind == "self"
    rules = [
        ("kind", _one_of([source.kind], KINDS), source.kind in KINDS),
        ("path", "given for this kind of source", by_itself or bool(source.path)),
        ("rows", "0 (all) or more; at least 1 when the target writes them", source.rows >= int(by_itself)),
        ("answers", "keep or regenerate", source.answers in ("keep", "regenerate")),
        ("answers", "regenerate where the target writes the questions", not (by_itself and source.answers == "keep")),
        ("openings", "at least one text (an empty one will do)", bool(source.openings)),
        ("max_tokens", "1 or more", source.max_tokens >= 1),
        ("temperatures", "numbers from 0 up", bool(source.temperatures) and min(source.temperatures) >= 0),
        ("subjects", "0 (none) or more", source.subjects >= 0),
    ]
    return [(key, rule) for key, rule, holds in rules if not holds]


def _numbers(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in tree.items():
        if isinstance(value, dict) and prefix + key not in ("data.sources", "target.template_args"):
            yield from _numbers(value, f"{prefix}{key}.")
        elif isinstance(value, float):
            yield prefix + key, value


def _one_of(given: Sequence[str], choices: Sequence[str], quantity: str = "one") -> str:
    """The rule in words, with the choice that is nearest to the first that is none."""
    known = [choice for choice in choices if choice]
    wrong = next((word for word in given if word not in choices), "")
    return f"{quantity} of {', '.join(known)}{', or empty' * ('' in choices)}.{did_you_mean(wrong, known)}".rstrip(".")


def _value(recipe: Recipe, key: str) -> Any:
    return functools.reduce(getattr, key.split("."), recipe)
