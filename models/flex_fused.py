"""FlexDraft's masks in decoding by the kernels of a GPU: `FlexDraft.verify` and `FlexDraft.block` say what is computed.

B rows, T verified tokens, S masks of a group, R = T * S, G = B * T groups, N heads, K key-value heads, D head size.
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from models.attention import Heads
from models.cache import KVCache
from models.linear import linear
from models.target import Target

ROOM = 16  # uncommitted slots that a cache has in any case (eval.settings.Settings.room)


def serve(drafter: Any, target: Target) -> bool:
    """Whether they are for this pair: the masks use the target's own feed-forward blocks, whose layers are plain."""
    c, device = drafter.config, target.device
    if device.type != "cuda" or target.kernels is None or c.inner_size:
        return False
    from models import fused_groups

    return c.block_size * c.num_attention_heads // c.num_key_value_heads <= fused_groups.MOST_ROWS


def ready(drafter: Any, target: Target) -> bool:
    return serve(drafter, target) and all(layer.packed is not None for layer in drafter.layers)


def verify(drafter: Any, target: Target, fused: ModuleType, ids_BT: Tensor, cache: KVCache) -> tuple[Tensor, Tensor]:
    """As FlexDraft.verify."""
    from models import fused_groups

    B, T = ids_BT.shape
    c, rope = drafter.config, target.rope(target.kinds[0])
    size, split, device = c.block_size, c.split_layer, ids_BT.device
    x, delta, mix = target.embed_tokens(ids_BT), None, target.fused_attention(fused, None, cache)
    for index, layer in enumerate(target.layers[:split]):
        x, normed = fused.add_norm(x, delta, layer.norms["input_layernorm"], target.eps)
        x, delta = target.fused_layer(fused, index, x, normed, mix)
    z = torch.cat((x if delta is None else x + delta, drafter.mask.to(x.dtype).expand(B, T * size, -1)), 1)
    seen_BT = cache.lengths.unsqueeze(1) + torch.arange(1, T + 1, device=device)
    places_R = (seen_BT.unsqueeze(2) + torch.arange(size, device=device)).flatten()
    begins_G = torch.arange(B, device=device).repeat_interleave(T) * (cache.keys.shape[2] * cache.capacity)
    delta = None
    for index, (own, layer) in enumerate(zip(drafter.layers, target.layers[split:], strict=True), split):
        z, normed = fused.add_norm(z, delta, layer.norms["input_layernorm"], target.eps)
        mixed = mix(index, linear(normed[:, :T], layer.qkv, layer.qkv_bias))
        heads = mask_heads(own, target, layer.scale)
        far = cache.keys[index], cache.values[index]
        qkv = linear(normed[:, T:], *own.packed).flatten(0, 1)
        out = fused_groups.behind(qkv, rope, places_R, far, begins_G, seen_BT.flatten(), size, heads)
        both = linear(mixed, layer.out.weight, layer.out.bias), own.o_proj(out.view(B, T * size, -1))
        z, delta = layer.fused_rest(fused, z, torch.cat(both, 1), target.eps)
    final = fused.add_norm(z, delta, target.final_norm, target.eps)[1]
    return final[:, :T], final[:, T:].unflatten(1, (T, size))


def block(drafter: Any, target: Target, fused: ModuleType, cache: KVCache) -> Tensor:
    """As FlexDraft.block. The masks' keys and values lie for the time of a layer where the next tokens' will."""
    c, rope, B = drafter.config, target.rope(target.kinds[0]), cache.rows
    size, split = c.block_size, c.split_layer
    all_of_them = torch.ones(B, size, size, dtype=torch.uint8, device=cache.lengths.device)
    y, delta = drafter.mask.to(target.dtype).expand(B, size, -1).contiguous(), None
    for index, (own, layer) in enumerate(zip(drafter.layers, target.layers[split:], strict=True), split):
        y, normed = fused.add_norm(y, delta, layer.norms["input_layernorm"], target.eps)
        depths = torch.arange(size, device=y.device).expand(B, size).contiguous()
        heads = mask_heads(own, target, layer.scale)
        mixed = fused.attention(linear(normed, *own.packed), rope, depths, cache, index, heads, all_of_them)
        y, delta = layer.fused_rest(fused, y, own.o_proj(mixed), target.eps)
    final: Tensor = fused.add_norm(y, delta, target.final_norm, target.eps)[1]
    return final


def mask_heads(own: Any, target: Target, scale: float) -> Heads:
    gains = own.gains(target.dtype)
    sizes = target.n_heads, target.n_kv, target.head_dim
    return Heads(*sizes, scale, target.eps, gains.get("q_norm"), gains.get("k_norm"))
