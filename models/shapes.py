"""Names and shapes that engines fill, by the config alone. `layers.0.` stands for `midlayer.` too.

H draft width, Ht target width, A captured states, D head size, F width of the MLP.
"""

from models.kinds import Draft, architectures

Shapes = dict[str, tuple[int, ...]]


def eagle3_shapes(draft: Draft) -> Shapes:
    H, Ht, A = draft.hidden, draft.target_hidden, draft.aux
    found: Shapes = {"fc.weight": (H, A * Ht), "norm.weight": (H,)}
    if draft.config.get("norm_before_fc") or draft.nested.get("norm_before_fc"):
        found["input_norm.weight"] = (A * Ht,)
    if draft.config.get("fc_norm"):
        found |= {f"fc_norm.{i}.weight": (Ht,) for i in range(A)}
    qwen3 = any("Qwen3ForCausalLM" in name for name in architectures(draft.config))
    qwen3 |= draft.kind == "speculators" and draft.config.get("model_type") == "qwen3"
    for i in range(draft.layers):
        found |= {f"layers.{i}.{name}": shape for name, shape in _block(draft, 2 * H if i == 0 else H, qwen3).items()}
        found[f"layers.{i}.hidden_norm.weight"] = (H,)
    return found


def dflash_shapes(draft: Draft) -> Shapes:
    inner = draft.config.get("dflash_config")
    ids = inner.get("target_layer_ids") if isinstance(inner, dict) else None
    H = draft.hidden
    found: Shapes = {"hidden_norm.weight": (H,), "norm.weight": (H,)}
    if isinstance(ids, list) and ids:
        found["fc.weight"] = (H, len(ids) * draft.target_hidden)
    for i in range(draft.layers):
        found |= {f"layers.{i}.{name}": shape for name, shape in _block(draft, H, qk_norm=True).items()}
    return found


def _block(draft: Draft, width: int, qk_norm: bool) -> Shapes:
    """One Llama-style layer whose attention reads `width` columns."""
    H, D, F = draft.hidden, draft.head_dim, draft.number("intermediate_size")
    q = draft.number("num_attention_heads") * D
    kv = draft.number("num_key_value_heads", draft.number("num_attention_heads")) * D
    found: Shapes = {
        "self_attn.q_proj.weight": (q, width),
        "self_attn.k_proj.weight": (kv, width),
        "self_attn.v_proj.weight": (kv, width),
        "self_attn.o_proj.weight": (H, q),
        "mlp.gate_proj.weight": (F, H),
        "mlp.up_proj.weight": (F, H),
        "mlp.down_proj.weight": (H, F),
        "input_layernorm.weight": (H,),
        "post_attention_layernorm.weight": (H,),
    }
    if qk_norm:
        found |= {f"self_attn.{name}_norm.weight": (D,) for name in "qk"}
    if draft.config.get("attention_bias"):
        found |= {f"self_attn.{n}_proj.bias": (size,) for n, size in (("q", q), ("k", kv), ("v", kv))}
    return found
