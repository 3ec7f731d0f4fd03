"""A drafter folder as others write it: its config and the headers of its weights, checked before any weight is read.

vLLM's and SGLang's layout (with or without `model.`, `layers.0.` for `midlayer.`), speculators', and the checkpoints of
SpecForge and SafeAILab/EAGLE. What this version can't decode exactly as engines would is refused by name.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.eagle3 import Eagle3Config
from models.facts import rope_of
from models.layout_tables import BLOCKS, FLAGS, OLD_NORMS, SPECULATORS, VLLM, shapes
from models.target import check_taps
from models.weights import Headers, read_headers
from recipes.files import read_json
from recipes.schema import UserError

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM", BLOCKS[True][0])
ROPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MOST = 1024  # captured states
OPTIONAL = ("embed_tokens.weight", "t2d")  # may be there or not
# frozen copies of the target's, and tables that follow from the config
IGNORED = ("verifier_lm_head.weight", "verifier_norm.weight", "midlayer.self_attn.rotary_emb.inv_freq")


@dataclass(frozen=True)
class Stored:
    """What a folder holds, read but for the weights."""

    folder: Path
    layout: str  # vllm (any flat one) or speculators
    fields: dict[str, Any]  # of Eagle3Config, but taps and target_layers
    ids: list[int] | None  # of the taps in h[L] numbering; None = the engines' default
    width: int  # how many taps
    window: int | None  # of a sliding attention, which is read as a full one
    names: dict[str, str]  # our name of each tensor -> the stored one
    dtype: torch.dtype

    def config(self, target_layers: int) -> Eagle3Config:
        """Raises UserError where the ids are out of range, out of order or not as many as the fused width says."""
        taps = check_taps(self.ids, target_layers, f"drafter={self.folder}: eagle_aux_hidden_state_layer_ids")
        if len(taps) != self.width:
            raise UserError(
                f"drafter={self.folder}: {len(taps)} taps, but fc.weight and num_aux_hidden_states are for {self.width}"
            )
        return Eagle3Config(**self.fields, taps=taps, target_layers=target_layers)

    @property
    def borrows_head(self) -> bool:
        """The head is the target's: vLLM shares it where a full-vocabulary drafter has none."""
        return "lm_head.weight" not in self.names


def read_stored(folder: Path, target_sizes: tuple[int, int] | None = None) -> Stored:
    """Raises UserError for what no engine, or not this version, could decode, or what is not for a target of this
    hidden size and vocabulary."""
    raw = read_json(folder / "config.json", f"drafter={folder}")

    def refuse(what: str) -> UserError:
        return UserError(f"drafter={folder}: {what}")

    speculators = "speculators_model_type" in raw
    qk_norm = _block_kind(raw, refuse)
    merged = (raw["transformer_layer_config"] | raw) if speculators else raw
    sizes = merged.get("hidden_size"), merged.get("vocab_size")
    if target_sizes is not None and None not in sizes and sizes != target_sizes:
        raise refuse(
            f"it is for hidden size {sizes[0]} and vocabulary {sizes[1]}, the target has {target_sizes[0]} and "
            f"{target_sizes[1]}. Give the drafter that was trained for it"
        )
    _refuse_undecodable(merged, refuse)
    fields = {**_sizes(merged, refuse), **_flags(merged, speculators, refuse), "qk_norm": qk_norm}
    fields["rope_parameters"] = _rope(merged, refuse)
    ids = _ids(merged, refuse)
    count = merged.get("num_aux_hidden_states")
    width = count if isinstance(count, int) and count > 0 else len(ids) if ids else 3
    if width > MOST:
        raise refuse(f"num_aux_hidden_states={width}: no target has as many layers")
    headers = read_headers(folder)
    placeholder = Eagle3Config(**fields, taps=tuple(range(width)), target_layers=width)
    names = _match(headers, placeholder, refuse)
    kinds = raw.get("layer_types") or merged.get("layer_types") or []
    if not isinstance(kinds, list):
        raise refuse(f"config.json says layer_types={kinds!r}, which must be a list")
    window = merged.get("sliding_window") if "sliding_attention" in kinds else None
    dtype = headers[names["fc.weight"]][1]
    assert isinstance(dtype, torch.dtype), "`_match` has looked"
    return Stored(folder, SPECULATORS if speculators else VLLM, fields, ids, width, window, names, dtype)


Refuse = Callable[[str], UserError]


def _block_kind(raw: dict[str, Any], refuse: Refuse) -> bool:
    """Whether the block has norms of queries and keys (Qwen3)."""
    if "speculators_model_type" not in raw:
        known = raw.get("architectures") or [ARCHITECTURES[0]]
        if not isinstance(known, list) or len(known) != 1 or known[0] not in ARCHITECTURES:
            raise refuse(f"architectures={known} is no EAGLE-3 drafter; readable: {', '.join(ARCHITECTURES)}")
        return bool(known[0] == BLOCKS[True][0])
    kind, inner = raw["speculators_model_type"], raw.get("transformer_layer_config")
    if kind != "eagle3":
        raise refuse(f"speculators_model_type={kind!r}: only eagle3 drafters can be decoded")
    if not isinstance(inner, dict):
        raise refuse("config.json has no transformer_layer_config, which the speculators format needs")
    if inner.get("model_type") not in ("llama", "qwen3"):
        raise refuse(f"its block is of type {inner.get('model_type')!r}; engines serve llama and qwen3 blocks only")
    return bool(inner["model_type"] == "qwen3")


def _refuse_undecodable(c: dict[str, Any], refuse: Refuse) -> None:
    if c.get("num_hidden_layers") != 1:
        raise refuse(f"{c.get('num_hidden_layers')} layers; only one-layer drafters are portable")
    if c.get("tie_word_embeddings"):
        raise refuse(
            "tie_word_embeddings is true: SGLang would take the embedding for the head. Set it to false in config.json"
        )
    on = [key for key in ("attention_bias", "qkv_bias", "mlp_bias", "bias", "quantization_config") if c.get(key)]
    nested = c.get("eagle_config") or {}
    if not isinstance(nested, dict) or nested.get("use_aux_hidden_state") is False:
        on.append("eagle_config (without auxiliary states: EAGLE-1)")
    on += [f"{key}={c[key]!r}" for key in ("logit_scale", "partial_rotary_factor") if c.get(key, 1) not in (1, None)]
    if c.get("hidden_act", "silu") != "silu":
        on.append(f"hidden_act={c['hidden_act']!r}")
    width = c.get("target_hidden_size")
    if width is not None and width != c.get("hidden_size"):
        on.append(f"target_hidden_size={width!r} beside hidden_size={c.get('hidden_size')!r}")
    if on:
        raise refuse(f"{', '.join(on)} set, which this version cannot decode")


def _sizes(c: dict[str, Any], refuse: Refuse) -> dict[str, Any]:
    """Whole numbers of the config, with the defaults of a Llama config."""
    needed = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    missing = [name for name in needed if c.get(name) is None]
    if missing:
        raise refuse(f"config.json is incomplete: no {', '.join(missing)}")
    defaults: dict[str, Callable[[], Any]] = {
        "num_key_value_heads": lambda: c["num_attention_heads"],
        "head_dim": lambda: c["hidden_size"] // c["num_attention_heads"],
        "max_position_embeddings": lambda: 2048,
        "draft_vocab_size": lambda: c["vocab_size"],
    }
    found: dict[str, Any] = {}
    for name in (*needed, *defaults):
        value = c.get(name)
        value = defaults[name]() if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise refuse(
                f"config.json says {name}={value!r}, which must be a whole number above 0. "
                "Put it right, or export the drafter again"
            )
        found[name] = value
    if found["num_attention_heads"] % found["num_key_value_heads"] or found["head_dim"] % 2:
        raise refuse("num_attention_heads must be a multiple of num_key_value_heads, and head_dim even")
    if found["draft_vocab_size"] > found["vocab_size"]:
        raise refuse(f"draft_vocab_size={found['draft_vocab_size']} is above vocab_size={found['vocab_size']}")
    eps = c.get("rms_norm_eps", 1e-6)
    if not isinstance(eps, int | float) or isinstance(eps, bool) or not 0 <= eps < math.inf:
        raise refuse(f"config.json says rms_norm_eps={eps!r}, which must be a number from 0 up")
    return {**found, "rms_norm_eps": float(eps)}


def _flags(c: dict[str, Any], speculators: bool, refuse: Refuse) -> dict[str, bool]:
    """As vLLM reads them: inside eagle_config norm_before_fc comes first, and the speculators format means
    norm_before_residual where it says nothing."""
    given = {"fc_norm": c.get("use_aux_norm"), "norm_before_residual": speculators, **c}
    given |= {k: v for k, v in (c.get("eagle_config") or {}).items() if k == "norm_before_fc"}
    flags = {}
    for name in FLAGS:
        value = given.get(name)
        if value not in (True, False, None):
            raise refuse(f"config.json says {name}={value!r}, which must be true or false")
        flags[name] = bool(value)
    if flags["fc_norm"] and flags["norm_before_fc"]:
        raise refuse("fc_norm and norm_before_fc are both set: this version decodes one of the two")
    return flags


def _rope(c: dict[str, Any], refuse: Refuse) -> dict[str, Any]:
    """Rotary parameters as transformers 5 writes them, of either form."""
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(c.get(key) or {}, dict):
            raise refuse(f"{key}={c[key]!r} is no mapping")
    rope = rope_of(c)
    kind, theta, part = rope["rope_type"], rope["rope_theta"], rope.get("partial_rotary_factor", 1)
    if part != 1:
        raise refuse(f"partial_rotary_factor={part!r} set, which this version cannot decode")
    if kind not in ROPES:
        raise refuse(f"rope_type={kind!r} is not known here; known: {', '.join(ROPES)}")
    if not isinstance(theta, int | float) or not 0 < theta < math.inf:
        raise refuse(f"rope_theta={theta!r} must be a number above 0")
    return rope


def _ids(c: dict[str, Any], refuse: Refuse) -> list[int] | None:
    """The taps in h[L] numbering. The nested list counts layer outputs, from 0, as SGLang reads it."""
    key = "eagle_aux_hidden_state_layer_ids"
    above, nested = c.get(key), (c.get("eagle_config") or {}).get(key)
    for ids in (above, nested):
        if ids is not None and not (isinstance(ids, list) and ids and all(type(i) is int for i in ids)):
            raise refuse(f"{key}={ids!r} must be a list of whole numbers")
    shifted = None if nested is None else [i + 1 for i in nested]
    if above is not None and shifted is not None and above != shifted:
        raise refuse(
            f"{key} is {above} and, inside eagle_config, {nested}: the second counts layer outputs, so it should be "
            f"{[i - 1 for i in above]}. Engines would capture different layers"
        )
    return shifted if above is None else above


def ours(stored: str) -> str:
    """Our name for a stored tensor."""
    name = stored.removeprefix("model.")
    name = f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name
    return OLD_NORMS.get(name, name)


def _match(headers: Headers, config: Eagle3Config, refuse: Refuse) -> dict[str, str]:
    """Our name of each tensor -> the stored one; refused if any is missing, unknown, twice, misshapen or quantised."""
    names: dict[str, str] = {}
    for stored in sorted(headers):
        name = ours(stored)
        if name in names:
            raise refuse(f"{names[name]} and {stored} are the same tensor, stored twice")
        if name not in IGNORED:
            names[name] = stored
    wanted = shapes(config)
    full = config.draft_vocab_size == config.vocab_size
    if full and names.keys() & {"d2t", "t2d"}:  # SpecForge writes an identity there; reading looks whether it is one
        wanted |= {"d2t": (config.vocab_size,), "t2d": (config.vocab_size,)}
    if not full and "d2t" not in names:
        raise refuse("d2t is missing, which a draft_vocab_size below vocab_size needs: engines would say other tokens")
    if not full and "lm_head.weight" not in names:
        raise refuse("lm_head.weight is missing, and the vocabulary is reduced: engines would serve random logits")
    missing = sorted(wanted.keys() - names.keys() - {*OPTIONAL, *(["lm_head.weight", "d2t"] if full else [])})
    unknown = sorted(names[n] for n in names.keys() - wanted.keys())
    wrong = sorted(names[n] for n in wanted.keys() & names.keys() if headers[names[n]][0] != wanted[n])
    if missing or unknown or wrong:
        raise refuse(
            f"tensors missing {missing}, unknown {unknown}, of wrong shape {wrong}, by its own config.json"
            f"{_hint(missing, config)}. Export or copy it again"
        )
    odd = [f"{names[n]} ({headers[names[n]][1]})" for n in names if not _fits(n, headers[names[n]][1])]
    if odd:
        raise refuse(f"tensors of a dtype that is not read here: {', '.join(sorted(odd))}")
    return names


def _hint(missing: list[str], config: Eagle3Config) -> str:
    if "midlayer.hidden_norm.weight" in missing and "norm.weight" in missing:
        return " (an EAGLE-1 or EAGLE-2 head? Only EAGLE-3 can be decoded)"
    on = [flag for flag in (*FLAGS, "qk_norm") if getattr(config, flag)]
    return f" (config.json sets {', '.join(on)})" if on and missing else ""


def _fits(name: str, dtype: torch.dtype | str) -> bool:
    if name == "d2t":
        return dtype in (torch.int64, torch.int32)
    return dtype in (torch.bool, torch.uint8, torch.int64) if name == "t2d" else dtype in FLOATS


def refuse_not_finite(tensors: dict[str, Tensor], folder: Path) -> None:
    bad = sorted(n for n, t in tensors.items() if not torch.isfinite(t.float()).all())
    if bad:
        raise UserError(f"drafter={folder}: not finite: {bad}")
