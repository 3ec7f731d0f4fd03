"""What a config.json says that an engine would stop at, read otherwise or leave out. Pure, as in findings.py."""

import math
from collections.abc import Iterator
from typing import Any

from models.facts import Facts, rope_of
from models.fault import BOTH, SGLANG, VLLM, Finding, listed
from models.kinds import Draft
from models.layout_tables import FLAGS

COUNTS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
    "target_hidden_size",
    "num_aux_hidden_states",
    "max_position_embeddings",
    "block_size",
)
FLOATS = ("F64", "F32", "F16", "BF16")
SHORT = 4096  # positions; below them a drafter is too short for most serving
POSITIONS = {"llama": 2048, "qwen2": 32768, "qwen3": 32768, "mistral": 131072}  # where config.json does not say
KINDS = ("full_attention", "sliding_attention")
ORIGINAL = "original_max_position_embeddings"
ROPES: dict[str, tuple[str, ...]] = {  # and what each scaling needs
    "default": (),
    "mrope": (),
    "linear": ("factor",),
    "ntk": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", ORIGINAL),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "longrope": ("short_factor", "long_factor", ORIGINAL),
}


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def counts(facts: Facts, draft: Draft) -> Iterator[Finding]:
    """Values that must be whole numbers or booleans, and the type that the config is read as."""
    if not (draft.eagle3 or draft.dflash):
        return
    config = draft.config
    given = {key: config[key] for key in COUNTS if config.get(key) is not None}
    odd = [f"{key}={value!r}" for key, value in given.items() if type(value) is not int or value < 1]
    if odd:
        what = f"{', '.join(odd[:4])} in config.json: whole numbers above 0 are read there"
        yield Finding(True, BOTH, what, "put it right", BOTH)
    switches = (*FLAGS, "tie_word_embeddings", "attention_bias", "use_aux_norm")
    odd = [f"{key}={config[key]!r}" for key in switches if not isinstance(config.get(key), bool | None)]
    if odd:
        what = f"{', '.join(odd)}: true or false is read there, and any text counts as true"
        yield Finding(True, BOTH, what, "write true or false")
    if draft.kind == "speculators":  # its block's type is looked at with the layout
        return
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind:
        what = f"model_type is {kind!r}, " if "model_type" in config else "model_type is not written, "
        what += "without which config.json can't be read"
        yield Finding(True, BOTH, what, 'write "llama", or "qwen3" for a block with norms of queries and keys', BOTH)
    elif kind not in POSITIONS:
        what = f"model_type is {kind!r}: engines stop unless they know it, and read keys left out as that family's"
        yield Finding(False, BOTH, what, "make sure that it is the block's (llama, qwen3)", loud=True)


def flags(facts: Facts, draft: Draft) -> Iterator[Finding]:
    if not (draft.eagle3 or draft.dflash):
        return
    config = draft.config
    eps = config.get("rms_norm_eps", 0.0)
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 <= eps < 1:
        yield Finding(True, BOTH, f"rms_norm_eps={eps!r} is no small number", "write the one of training", BOTH)
    if config.get("hidden_act", "silu") != "silu":
        what = f"hidden_act is {config['hidden_act']!r}: the engines' MLP knows silu alone"
        yield Finding(True, BOTH, what, "write the one of training; another than silu can't be served", BOTH)
    if draft.eagle3:
        yield from _eagle3_flags(facts, draft)


def _eagle3_flags(facts: Facts, draft: Draft) -> Iterator[Finding]:
    config = draft.config
    if config.get("tie_word_embeddings") is True:
        what = "tie_word_embeddings is true: SGLang drafts with the embedding table as its head"
        yield Finding(True, SGLANG, what, 'write "tie_word_embeddings": false')
    elif "tie_word_embeddings" not in config:
        what = "tie_word_embeddings is not written, and a default of true would tie the head"
        yield Finding(False, SGLANG, what, "write false")
    if config.get("norm_before_residual"):
        what = "norm_before_residual is true, which SGLang does not know: its residual is the un-normed state"
        yield Finding(True, SGLANG, what, "serve it with vLLM, or train without the flag")
    if draft.layers > 1:
        what = f"{draft.layers} layers: SGLang norms the later ones by hidden_norm, vLLM by input_layernorm"
        yield Finding(True, SGLANG, what, "one-layer drafters alone are portable")
    if config.get("attention_bias"):
        yield Finding(True, SGLANG, "attention_bias is true, which SGLang does not know", "serve it with vLLM")
    if draft.old:
        what = f"{', '.join(draft.old)}: names that SGLang still reads as fc_norm's, and vLLM does not know"
        yield Finding(True, VLLM, what, "python -m models.export layout=portable writes today's", VLLM)
    if config.get("use_aux_norm") and config.get("fc_norm") is False:
        what = "use_aux_norm is true and fc_norm, whose older name it is, false: which is read differs by engine"
        yield Finding(True, BOTH, what, "write fc_norm alone")
    if config.get("fc_norm") and (config.get("norm_before_fc") or draft.nested.get("norm_before_fc")):
        what = (
            "fc_norm and norm_before_fc are both on: vLLM norms the states twice, and Espalier decodes no such drafter"
        )
        yield Finding(False, BOTH, what, "make sure that it was trained so", loud=True)
    yield from _hidden_flags(facts, draft)
    if draft.nested.get("use_aux_hidden_state") is False:
        yield Finding(True, BOTH, "eagle_config.use_aux_hidden_state is false: fc is left out", "set it to true")
    if draft.kind == "specforge" and config.get("norm_output"):
        what = "norm_output of SpecForge means the norm before the head; engines feed the normed state to the next step"
        yield Finding(True, BOTH, what, "remove norm_output from config.json")


def _hidden_flags(facts: Facts, draft: Draft) -> Iterator[Finding]:
    """What stands where no engine looks."""
    inner = draft.config.get("eagle_config")
    if not isinstance(inner, dict | None):
        what = f"eagle_config={inner!r} is no mapping"
        yield Finding(True, BOTH, what, "remove it, or export the drafter again", BOTH)
    hidden = [flag for flag in FLAGS if draft.nested.get(flag) and not draft.config.get(flag)]
    if hidden:
        what = f"{', '.join(hidden)} only inside eagle_config, where not every engine looks"
        yield Finding(True, BOTH, what, "write it at the top level as well")
    block = facts.config.get("transformer_layer_config")
    if draft.kind != "speculators" or draft.peagle or not isinstance(block, dict):
        return
    inside = [flag for flag in FLAGS if block.get(flag) and not facts.config.get(flag)]
    if inside:
        what = f"{', '.join(inside)} only inside transformer_layer_config: vLLM looks at the top level and takes false"
        yield Finding(True, VLLM, what, "write it at the top level")
    if draft.aux != 3 and block.get("num_aux_hidden_states") is None:
        what = f"num_aux_hidden_states={draft.aux} only at the top level: vLLM takes it from transformer_layer_config"
        yield Finding(True, VLLM, f"{what}, and 3 where it is not there", "write it inside as well", VLLM)


def unusual(facts: Facts, draft: Draft) -> Iterator[Finding]:
    """Keys that change what the block computes, in some engine or in none."""
    config = draft.config
    if not (draft.eagle3 or draft.dflash):
        return
    if config.get("quantization_config"):
        what = "quantization_config: engines would build quantised layers"
        if any(name.endswith("_proj.weight") and stored.dtype in FLOATS for name, stored in draft.tensors.items()):
            yield Finding(True, BOTH, f"{what}, and the weights are plain floats", "remove it from config.json", BOTH)
    scale = config.get("logit_scale")
    if scale is not None and not (is_number(scale) and scale > 0):
        yield Finding(True, BOTH, f"logit_scale={scale!r} is no number above 0", "write the one of training", VLLM)
    elif scale not in (None, 1):
        what = f"logit_scale={scale}: vLLM multiplies the logits by it, SGLang does not know it"
        yield Finding(False, BOTH, what, "greedy drafts stay the same, sampled ones don't", loud=True)
    part = rope_of(config).get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if part is not None and not (is_number(part) and 0 < part <= 1):
        yield Finding(True, BOTH, f"partial_rotary_factor={part!r} is not in (0, 1]", "write the one of training", BOTH)
    elif part not in (None, 1):
        what = f"partial_rotary_factor={part}: engines rotate that part of each head alone"
        yield Finding(False, BOTH, what, "remove it unless the drafter was trained so", loud=True)
    if draft.eagle3:  # both engines follow a DFlash drafter's windows
        yield from _window(config, draft)


def _window(config: dict[str, Any], draft: Draft) -> Iterator[Finding]:
    """A sliding attention: vLLM follows layer_types, SGLang none of it."""
    size, kinds = config.get("sliding_window"), config.get("layer_types")
    used = config.get("use_sliding_window", "qwen" not in str(config.get("model_type")))  # Qwen's own default is off
    known = isinstance(kinds, list) and all(kind in KINDS for kind in kinds) and len(kinds) >= draft.layers
    slides = isinstance(kinds, list) and known and "sliding_attention" in kinds[: draft.layers]
    if kinds is not None and not known:
        what = f"layer_types={kinds!r} must name {' or '.join(KINDS)} for each of {draft.layers} layers"
        yield Finding(True, BOTH, what, "put it right, or remove it", VLLM)
    elif slides and (type(size) is not int or size < 1):
        what = f"layer_types names a sliding attention, and sliding_window is {size!r}"
        yield Finding(True, BOTH, what, "write the window of training", VLLM)
    elif slides:
        what = f"a window of {size} tokens (layer_types), which SGLang's drafter does not know: it sees all"
        yield Finding(False, SGLANG, what, "serve it with vLLM past that length", loud=True)
    elif size is not None and kinds is None and used:
        what = f"sliding_window={size!r} without layer_types: both engines' drafters see all"
        cure = "write layer_types if it was trained with a window, else remove sliding_window"
        yield Finding(False, BOTH, what, cure, loud=True)


def positions(facts: Facts, draft: Draft) -> Iterator[Finding]:
    length, target = draft.number("max_position_embeddings"), facts.target
    cure, said = "write the target's, if RoPE and training allow it", f"max_position_embeddings={length}"
    if draft.config.get("max_position_embeddings") is None:
        length = POSITIONS.get(str(draft.config.get("model_type")), POSITIONS["llama"])
        said = f"max_position_embeddings is not written, and read as {length}"
        if not target or length >= target.max_positions:
            yield Finding(False, BOTH, f"{said}: engines fail or slow down past it", cure, loud=True)
            return
    if target and 0 < length < target.max_positions:
        what = f"{said}, the target has {target.max_positions}: SGLang fails past it"
        yield Finding(True, SGLANG, f"{what} (vLLM before 0.32 too)", cure)
    elif 0 < length < SHORT and not target:
        yield Finding(False, BOTH, f"{said}: engines fail or slow down past it", cure)


def rotary(facts: Facts, draft: Draft) -> Iterator[Finding]:
    if not (draft.eagle3 or draft.dflash):
        return
    config = draft.config
    odd = [key for key in ("rope_parameters", "rope_scaling") if not isinstance(config.get(key) or {}, dict)]
    if odd:
        yield Finding(True, BOTH, f"{odd[0]}={config[odd[0]]!r} is no mapping", "write the one of training", BOTH)
        return
    now, before = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if apart := [key for key in before.keys() & now.keys() if before[key] != now[key]]:
        what = (
            f"rope_scaling and rope_parameters disagree ({listed(sorted(apart), 4)}): which is read differs by engine"
        )
        yield Finding(True, BOTH, what, "write the ones of training in both places, or rope_parameters alone")
    rope = rope_of(config)
    theta, kind, above = rope["rope_theta"], rope["rope_type"], config.get("rope_theta")
    wrong = [value for value in (above, theta) if value is not None and not (is_number(value) and value > 0)]
    if wrong:
        what = f"rope_theta={wrong[0]!r} is no number above 0"
        yield Finding(True, BOTH, what, "write the one of training", BOTH)
    elif above is not None and above != theta:
        what = f"rope_theta={above} and rope_parameters.rope_theta={theta} disagree: which is read differs by engine"
        yield Finding(True, BOTH, what, "write the one of training in both places")
    if not isinstance(kind, str) or kind not in ROPES:
        what = f"rope_type={kind!r} is none of {', '.join(ROPES)}"
        yield Finding(True, BOTH, what, "write the one of training", BOTH)
        return
    lacking = [key for key in ROPES[kind] if rope.get(key, config.get(key) if key == ORIGINAL else None) is None]
    if kind == "dynamic" and "alpha" in rope:
        lacking = []
    if lacking:
        stops = BOTH if lacking != [ORIGINAL] else ()  # the length of today would stand for it
        what = f"rope_type {kind} without {', '.join(lacking)}"
        yield Finding(True, BOTH, what, "write the ones of training: nearly always the target's", stops)
