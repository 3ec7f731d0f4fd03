"""The checkpoints that FlexDraft's authors published (github.com/Yaro1214/FlexDraft), read as ours.

A Qwen3 config with `block_size`, `num_target_layers`, `num_hidden_layers` (of the draft), and under
`flexdraft_config`, or `dflash_config` as released, `target_layer_ids`, `enable_anchor_bias_logits`, `anchor_bias_rank`.
Tensors: `mask_embedding`, `layers.{i}.self_attn.{q,k,v,o}_proj.weight` and `.{q,k}_norm.weight` with i from 0 at the
split layer, and the calibrator `anchor_bias_mlp.{0,2}.{weight,bias}`; the draft's own norms and feed-forward blocks,
which are there too, are not used by their decoding either. Nothing in it says of which target it is.
"""

import re
from pathlib import Path
from typing import Any

from models.flexdraft import FlexDraft, FlexDraftConfig
from models.source import Source
from models.target import Target
from models.weights import read_headers
from recipes.files import read_json
from recipes.schema import UserError

KEYS = ("flexdraft_config", "dflash_config")
MARK = "mask_embedding"
UNUSED = re.compile(r"norm\.weight|layers\.\d+\.(mlp\..+|input_layernorm\.weight|post_attention_layernorm\.weight)")
NUMBERS = (
    "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "num_target_layers",
    "num_hidden_layers", "block_size",
)  # fmt: skip


def is_published(folder: Path) -> bool:
    """DFlash's drafters have such a config as well, but no mask vector."""
    path = folder / "config.json"
    config = read_json(path, f"drafter={folder}") if path.is_file() else {}
    return "num_target_layers" in config and any(key in config for key in KEYS) and MARK in read_headers(folder)


def read_config(folder: Path) -> FlexDraftConfig:
    """Raises UserError naming the key that is missing or asks for what is not done here."""
    raw = read_json(folder / "config.json", f"drafter={folder}")
    settings: dict[str, Any] = next((raw[key] for key in KEYS if isinstance(raw.get(key), dict)), {})
    if odd := [key for key in NUMBERS if type(raw.get(key)) is not int or raw[key] < 1]:
        raise UserError(f"drafter={folder}: config.json's {odd[0]} is no number above 0")
    layers, target_layers = raw["num_hidden_layers"], raw["num_target_layers"]
    ids, split = settings.get("target_layer_ids"), target_layers - layers
    if not isinstance(ids, list) or ids != list(range(split, target_layers)) or split < 0:
        raise UserError(
            f"drafter={folder}: config.json's target_layer_ids must be the last {layers} of {target_layers} layers, "
            f"one after the other; they are {ids}"
        )
    eps, rank = raw.get("rms_norm_eps"), settings.get("anchor_bias_rank", 256)
    if not isinstance(eps, float) or type(rank) is not int or rank < 1:
        raise UserError(f"drafter={folder}: config.json's rms_norm_eps or anchor_bias_rank is no number above 0")
    bias = raw.get("attention_bias") is True
    return FlexDraftConfig(
        hidden_size=raw["hidden_size"],
        num_attention_heads=raw["num_attention_heads"],
        num_key_value_heads=raw["num_key_value_heads"],
        head_dim=raw["head_dim"],
        rms_norm_eps=eps,
        vocab_size=raw["vocab_size"],
        target_layers=target_layers,
        split_layer=split,
        block_size=raw["block_size"],
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        calibrator_rank=rank if settings.get("enable_anchor_bias_logits") is True else 0,
    )


def names(drafter: FlexDraft) -> dict[str, str]:
    """Parameter -> name in the file."""
    places = {"mask": MARK}
    for ours in drafter.state_dict():
        head, _, rest = ours.partition(".")
        if head == "layers":
            number, _, part = rest.partition(".")
            part = f"{part}.weight" if part in ("q_norm", "k_norm") else part
            places[ours] = f"layers.{number}.self_attn.{part}"
        elif head == "calibrator":
            part, _, kind = rest.partition(".")
            places[ours] = f"anchor_bias_mlp.{0 if part == 'inner' else 2}.{kind}"
    return places


def refuse_other_sizes(folder: Path, config: FlexDraftConfig, target: Source | Target) -> None:
    """All that can be told of one without a fingerprint; another target's, or a damaged config."""
    theirs: dict[str, Any] = {"hidden_size": target.hidden_size, "target_layers": target.n_layers}
    theirs |= {"vocab_size": target.vocab_size, "rms_norm_eps": target.eps}
    if isinstance(target, Target):
        same = FlexDraftConfig.from_target(target, 1, config.block_size)
        keys = ("num_attention_heads", "num_key_value_heads", "head_dim", "qk_norm")
        theirs |= {key: getattr(same, key) for key in keys}
    for key, value in theirs.items():
        if getattr(config, key) != value:
            raise UserError(f"drafter={folder}: its {key} is {getattr(config, key)}, the target's {value}")


def refuse_unknown(folder: Path, known: set[str], found: set[str]) -> None:
    if odd := sorted(name for name in found - known if not UNUSED.fullmatch(name)):
        raise UserError(f"drafter={folder}: {odd[0]} is no tensor of a published FlexDraft ({len(odd)} such)")
