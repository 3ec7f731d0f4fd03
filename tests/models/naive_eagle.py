"""EAGLE-3 written down a second time, slowly: one full causal forward over a plain sequence, nothing cached or masked.

Written from the equations that engines implement; shares no code with models/. No batch: T slots, H hidden.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float


def rms(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * gain


def turn(x_TND: Tensor, theta: float) -> Tensor:
    """Rotary phases 0, 1, 2, ... in the order of the sequence."""
    T, D = x_TND.shape[0], x_TND.shape[2]
    out = torch.empty_like(x_TND)
    for pair in range(D // 2):
        angle = torch.arange(T, dtype=torch.float64) * theta ** (-2 * pair / D)
        cos, sin = angle.cos().to(x_TND.dtype).unsqueeze(1), angle.sin().to(x_TND.dtype).unsqueeze(1)
        a, b = x_TND[..., pair], x_TND[..., pair + D // 2]
        out[..., pair], out[..., pair + D // 2] = a * cos - b * sin, b * cos + a * sin
    return out


def layer(w: Mapping[str, Tensor], s: Shape, states_TH: Tensor, embeds_TH: Tensor) -> Tensor:
    """States of a whole sequence -> its outputs, before the final norm [T, H]."""
    T = len(states_TH)
    e = rms(embeds_TH, w["midlayer.input_layernorm.weight"], s.eps)
    g = rms(states_TH, w["midlayer.hidden_norm.weight"], s.eps)
    x = torch.cat([e, g], -1)
    q = turn((x @ w["midlayer.self_attn.q_proj.weight"].T).reshape(T, s.heads, s.head_dim), s.theta)
    k = turn((x @ w["midlayer.self_attn.k_proj.weight"].T).reshape(T, s.kv_heads, s.head_dim), s.theta)
    v = (x @ w["midlayer.self_attn.v_proj.weight"].T).reshape(T, s.kv_heads, s.head_dim)
    heads = []
    for n in range(s.heads):
        shared = n // (s.heads // s.kv_heads)
        scores = q[:, n] @ k[:, shared].T / s.head_dim**0.5
        scores = scores + torch.full((T, T), float("-inf"), dtype=x.dtype).triu(1)
        heads.append(scores.softmax(-1) @ v[:, shared])
    h = states_TH + torch.cat(heads, -1) @ w["midlayer.self_attn.o_proj.weight"].T
    y = rms(h, w["midlayer.post_attention_layernorm.weight"], s.eps)
    gate, up = y @ w["midlayer.mlp.gate_proj.weight"].T, y @ w["midlayer.mlp.up_proj.weight"].T
    return h + (gate * torch.sigmoid(gate) * up) @ w["midlayer.mlp.down_proj.weight"].T


def logits(w: Mapping[str, Tensor], s: Shape, state: Tensor) -> Tensor:
    return rms(state, w["norm.weight"], s.eps) @ w["lm_head.weight"].T


def chain(w: Mapping[str, Tensor], s: Shape, taps_TC: Tensor, embeds_TH: Tensor, drafted_DH: Tensor) -> list[Tensor]:
    """States [H] at the last committed slot and after each drafted token: D + 1 full forwards, each over everything.

    `taps` and `embeds` are those of the committed slots; `drafted` the embeddings of the tokens drafted so far.
    """
    states, embeds = taps_TC @ w["fc.weight"].T, embeds_TH
    found = [layer(w, s, states, embeds)[-1]]
    for token in drafted_DH:
        states = torch.cat([states, found[-1].unsqueeze(0)])
        embeds = torch.cat([embeds, token.unsqueeze(0)])
        found.append(layer(w, s, states, embeds)[-1])
    return found
