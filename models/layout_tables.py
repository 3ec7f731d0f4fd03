"""What engines call the tensors and settings of an EAGLE-3 drafter, and what they can't express.

vLLM 0.33, SGLang 0.5.23 and speculators 0.9, as their sources read. `portable` is what vLLM and SGLang both read.
H hidden, A taps, C = A * H, I intermediate, D head size, Q = heads * D, K = key-value heads * D, V vocabulary, Vd draft
vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from models.eagle3 import Eagle3Config

PORTABLE, VLLM, SGLANG, SPECULATORS = LAYOUTS = ("portable", "vllm", "sglang", "speculators")
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")  # qk_norm shows in the architecture
BLOCKS = {False: ("LlamaForCausalLMEagle3", "llama"), True: ("Eagle3Qwen3ForCausalLM", "qwen3")}  # by qk_norm
# of fc_norm, which SGLang still reads; with them goes the flag `use_aux_norm`
OLD_NORMS = {f"aux_norm_{part}.weight": f"fc_norm.{i}.weight" for i, part in enumerate(("low", "mid", "high"))}
Condition = Callable[[Eagle3Config], bool]


def _always(_: Eagle3Config) -> bool:
    return True


def reduced(c: Eagle3Config) -> bool:
    return c.draft_vocab_size < c.vocab_size


class Row(NamedTuple):
    """A tensor: our name, that of vLLM and SGLang, that of speculators; empty where the layout leaves it out. `{i}`
    counts the taps."""

    ours: str
    flat: str
    speculators: str
    shape: str
    when: Condition = _always


def _in_layer(name: str, shape: str, when: Condition = _always) -> Row:
    return Row(f"midlayer.{name}.weight", f"midlayer.{name}.weight", f"layers.0.{name}.weight", shape, when)


TENSORS = (
    # engines share the target's embedding; speculators leaves one that is absent at zero
    Row("embed_tokens.weight", "", "embed_tokens.weight", "V H"),
    Row("input_norm.weight", "input_norm.weight", "input_norm.weight", "C", lambda c: c.norm_before_fc),
    Row("fc_norm.{i}.weight", "fc_norm.{i}.weight", "fc_norm.{i}.weight", "H", lambda c: c.fc_norm),
    Row("fc.weight", "fc.weight", "fc.weight", "H C"),
    _in_layer("input_layernorm", "H"),
    _in_layer("hidden_norm", "H"),
    _in_layer("self_attn.q_proj", "Q 2H"),
    _in_layer("self_attn.k_proj", "K 2H"),
    _in_layer("self_attn.v_proj", "K 2H"),
    _in_layer("self_attn.o_proj", "H Q"),
    _in_layer("self_attn.q_norm", "D", lambda c: c.qk_norm),
    _in_layer("self_attn.k_norm", "D", lambda c: c.qk_norm),
    _in_layer("post_attention_layernorm", "H"),
    _in_layer("mlp.gate_proj", "I H"),
    _in_layer("mlp.up_proj", "I H"),
    _in_layer("mlp.down_proj", "H I"),
    Row("norm.weight", "norm.weight", "norm.weight", "H"),
    Row("lm_head.weight", "lm_head.weight", "lm_head.weight", "Vd H"),
    Row("d2t", "d2t", "d2t", "Vd", reduced),
    Row("t2d", "t2d", "t2d", "V", reduced),
)


class Refusal(NamedTuple):
    layouts: tuple[str, ...]
    when: Condition
    why: str


REFUSALS = (
    Refusal(
        (PORTABLE, SGLANG),
        lambda c: c.norm_before_residual,
        "norm_before_residual: SGLang's residual stream always starts from the un-normed state",
    ),
    Refusal((PORTABLE, SGLANG), lambda c: c.qk_norm, "qk_norm: SGLang's drafter has no norms of queries and keys"),
    Refusal(
        (PORTABLE, SGLANG), lambda c: 0 in c.taps, "taps include the embedding output h[0], which SGLang cannot capture"
    ),
    Refusal(
        (PORTABLE, SGLANG),
        lambda c: len(c.taps) == 1,
        "a single tap: SGLang applies fc only where the taps are wider than the drafter",
    ),
)


def why_not(config: Eagle3Config, layout: str) -> list[str]:
    """The reasons for which a layout can't express the drafter; none if it can."""
    return [r.why for r in REFUSALS if layout in r.layouts and r.when(config)]


def names(config: Eagle3Config, layout: str) -> dict[str, str]:
    """Our name of each tensor in the layout -> the layout's name."""
    found = {}
    for row in TENSORS:
        theirs = row.speculators if layout == SPECULATORS else row.flat
        if theirs and row.when(config):
            for i in range(len(config.taps) if "{i}" in row.ours else 1):
                found[row.ours.format(i=i)] = theirs.format(i=i)
    return found


def shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that any layout holds of this drafter, by our name."""
    H, D = config.hidden_size, config.head_dim
    sizes = {"H": H, "2H": 2 * H, "C": len(config.taps) * H, "I": config.intermediate_size, "D": D}
    sizes |= {"Q": config.num_attention_heads * D, "K": config.num_key_value_heads * D}
    sizes |= {"V": config.vocab_size, "Vd": config.draft_vocab_size}
    by_row = {row.ours: tuple(sizes[s] for s in row.shape.split()) for row in TENSORS if row.when(config)}
    counted = {f"fc_norm.{i}.weight": by_row["fc_norm.{i}.weight"] for i in range(len(config.taps)) if config.fc_norm}
    return {name: shape for name, shape in by_row.items() if "{i}" not in name} | counted


def default_taps(target_layers: int) -> tuple[int, int, int]:
    """What engines capture when no ids are given, in h[L] numbering."""
    return (2, target_layers // 2, target_layers - 3)


def layer_ids(config: Eagle3Config, layout: str) -> dict[str, Any]:
    """The config keys that tell engines which states to capture.

    vLLM reads the top-level list, which counts h[L]; SGLang the nested one, and adds 1 to each. Without ids both take
    the default taps, so there these are left out; speculators always writes them.
    """
    above: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": list(config.taps)}
    nested = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [t - 1 for t in config.taps]}
    if layout == SPECULATORS:
        return above
    if config.taps == default_taps(config.target_layers):
        return {}
    keys = {VLLM: above, SGLANG: {"eagle_config": nested}, PORTABLE: above | {"eagle_config": nested}}
    return keys[layout]


def block(config: Eagle3Config) -> dict[str, Any]:
    """The decoder layer's own keys."""
    return {
        "model_type": BLOCKS[config.qk_norm][1],
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": config.rope_parameters,
        "rope_theta": config.rope_parameters.get("rope_theta", 10000.0),
        "tie_word_embeddings": False,
    }


def engine_config(config: Eagle3Config, layout: str, dtype: str, verifier: dict[str, Any]) -> dict[str, Any]:
    """config.json. `verifier` is the target as speculators names it: name_or_path and architectures."""
    shared = {
        "target_hidden_size": config.hidden_size,
        "draft_vocab_size": config.draft_vocab_size,
        "num_aux_hidden_states": len(config.taps),
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        **{flag: getattr(config, flag) for flag in FLAGS},
        **layer_ids(config, layout),
    }
    if layout != SPECULATORS:
        if not config.norm_output:  # engines' default; to SpecForge false means that the head reads an un-normed state
            del shared["norm_output"]
        return {"architectures": [BLOCKS[config.qk_norm][0]], **block(config), **shared}
    method = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "transformer_layer_config": block(config) | {"num_aux_hidden_states": len(config.taps)},  # vLLM looks there
        **shared,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": verifier,
        },
    }
