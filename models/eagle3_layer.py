"""The modules of EAGLE-3's one decoder layer and of its head (models/eagle3.py).

B batch, T slots, n slots that ask, H hidden, N heads, K key-value heads, D head size, Vd draft vocabulary.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from models.lean import gated, normed_pair, remade, rms_norm, rotate
from models.linear import Linear

if TYPE_CHECKING:
    from models.eagle3 import Eagle3Config


def picked(x: Tensor, index_n: Tensor | None, axis: int) -> Tensor:
    """The slots of `index` along an axis; all of them where it is None."""
    return x if index_n is None else x.index_select(axis, index_n)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, c: "Eagle3Config") -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.q_proj = Linear(2 * c.hidden_size, self.heads * c.head_dim, bias=False)
        self.k_proj = Linear(2 * c.hidden_size, self.kv_heads * c.head_dim, bias=False)
        self.v_proj = Linear(2 * c.hidden_size, self.kv_heads * c.head_dim, bias=False)
        self.o_proj = Linear(self.heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else None

    def project(
        self, x_BTX: Tensor, rope: tuple[Tensor, Tensor], asking_n: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [B, N, T, D] (of the `asking` slots alone if given) and keys, and values [B, K, T, D]."""
        asks = picked(x_BTX, asking_n, 1)
        q, k, v = (
            linear(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for linear, x in ((self.q_proj, asks), (self.k_proj, x_BTX), (self.v_proj, x_BTX))
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        cos, sin = rope
        return rotate(q, picked(cos, asking_n, 1), picked(sin, asking_n, 1)), rotate(k, cos, sin), v


class MLP(nn.Module):
    def __init__(self, c: "Eagle3Config") -> None:
        super().__init__()
        self.gate_proj = Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor, lean: bool = False) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        product = gated(gate, up)
        with remade(product, lambda: gated(gate, up), lean):
            out: Tensor = self.down_proj(product)
        return out


AttendFn = Callable[[Tensor, Tensor, Tensor], Tensor]  # (q, k, v) -> [B, T, N*D]


class Layer(nn.Module):
    """Attention reads [normed embedding ; normed state]; the residual stream starts from the un-normed state, or from
    the normed one with `norm_before_residual`."""

    def __init__(self, c: "Eagle3Config") -> None:
        super().__init__()
        self.norm_before_residual = c.norm_before_residual
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.mlp = MLP(c)

    def forward(
        self,
        state_BTH: Tensor,
        embed_BTH: Tensor,
        rope: tuple[Tensor, Tensor],
        attention: AttendFn,
        asking_n: Tensor | None = None,
        lean: bool = False,
    ) -> Tensor:
        """The outputs of all slots, or of the `asking` ones; every slot makes keys and values. `lean`: hold less for
        the backward and make it again."""

        def read() -> Tensor:
            gains = self.input_layernorm.weight, self.hidden_norm.weight
            return normed_pair(embed_BTH, gains[0], state_BTH, gains[1], self.hidden_norm.eps)

        x = read()
        residual = picked(x[..., embed_BTH.shape[-1] :] if self.norm_before_residual else state_BTH, asking_n, 1)
        with remade(x, read, lean):
            q, k, v = self.self_attn.project(x, rope, asking_n)
        h = residual + self.self_attn.o_proj(attention(q, k, v))
        normed = self.post_attention_layernorm(h)
        with remade(normed, lambda: self.post_attention_layernorm(h), lean):
            out: Tensor = h + self.mlp(normed, lean)
        return out


class Head(Linear):
    """The drafter's head. `through` may take its input and weight in place of the product: a loss that never holds all
    logits is then part of this module's forward, around which sharded training gathers the weight."""

    def forward(self, x: Tensor, through: Callable[[Tensor, Tensor], Any] | None = None) -> Any:
        return super().forward(x) if through is None else through(x, self.weight)
