"""The modules of EAGLE-3's one decoder layer and of its head (models/eagle3.py).

B batch, T slots, n slots that ask, U tokens that slots read, H hidden, N heads, K key-value heads, D head size,
Vd draft vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.lean import gated, remade, rms_norm, rotate, windows
from models.linear import Linear

if TYPE_CHECKING:
    from models.eagle3 import Eagle3Config


def picked(x: Tensor, index_n: Tensor | None, axis: int) -> Tensor:
    """The slots of `index` along an axis; all of them where it is None."""
    return x if index_n is None else x.index_select(axis, index_n)


def kept(x_KTD: Tensor, index_n: Tensor | None) -> Tensor:
    """[K, n, D]; a slot's heads lie side by side, as they did."""
    return picked(x_KTD.transpose(0, 1), index_n, 0).transpose(0, 1)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Through(Linear):
    """`through` may take the input and the weight in place of the product: it is then part of this module's forward,
    around which sharded training gathers the weight."""

    def forward(self, x: Tensor | None, through: Callable[[Any, Tensor], Any] | None = None) -> Any:
        if through is not None:
            return through(x, self.weight)
        assert x is not None
        return super().forward(x)


class Attention(nn.Module):
    def __init__(self, c: "Eagle3Config") -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.q_proj = Through(2 * c.hidden_size, self.heads * c.head_dim, bias=False)
        self.k_proj = Through(2 * c.hidden_size, self.kv_heads * c.head_dim, bias=False)
        self.v_proj = Through(2 * c.hidden_size, self.kv_heads * c.head_dim, bias=False)
        self.o_proj = Linear(self.heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else None

    def turned(
        self, q: Tensor, k: Tensor, v: Tensor, rope: tuple[Tensor, Tensor], asking_n: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The products [B, T, N D] as heads: rotated queries [B, N, T, D] (of the `asking` slots alone if given) and
        keys, and values [B, K, T, D]."""
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        cos, sin = rope
        return rotate(q, picked(cos, asking_n, 1), picked(sin, asking_n, 1)), rotate(k, cos, sin), v

    def weights(self, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Copies of the weights of queries, and of keys and values together: (what multiplies embeddings, states)."""

        def copied(_: None, weight: Tensor) -> Tensor:
            return weight.to(dtype, copy=True)  # sharded training takes the weight itself away again

        q, k, v = (module(None, copied) for module in (self.q_proj, self.k_proj, self.v_proj))
        halves = [weight.chunk(2, 1) for weight in (q, torch.cat((k, v)))]
        return [(embed, state) for embed, state in halves]


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


@dataclass(frozen=True)
class Said:
    """What the embeddings add to a step's queries [n, N D], and to its keys and values [T, 2 K D]; and the weights by
    which the states add the rest."""

    q_nQ: Tensor
    kv_TK: Tensor
    of_state: tuple[Tensor, Tensor]


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

    def forward(self, state_BTH: Tensor, embed_BTH: Tensor, rope: tuple[Tensor, Tensor], attention: AttendFn) -> Tensor:
        own, normed = self.self_attn, self.hidden_norm(state_BTH)
        x = torch.cat((self.input_layernorm(embed_BTH), normed), -1)
        q, k, v = own.turned(own.q_proj(x), own.k_proj(x), own.v_proj(x), rope)
        residual = normed if self.norm_before_residual else state_BTH
        return self._onward(residual, attention(q, k, v))

    def said(self, embed_UH: Tensor, queries: Sequence[slice | Tensor], keys: Sequence[slice | Tensor]) -> list[Said]:
        """Of each step of an unroll whose slots read these rows of the embeddings. A token's share is the same at
        whichever step it is read, and multiplied once."""
        normed = self.input_layernorm(embed_UH)
        (q_embed, q_state), (kv_embed, kv_state) = self.self_attn.weights(embed_UH.dtype)
        of_q, of_kv = windows(F.linear(normed, q_embed), queries), windows(F.linear(normed, kv_embed), keys)
        return [Said(q_nQ, kv_TK, (q_state, kv_state)) for q_nQ, kv_TK in zip(of_q, of_kv, strict=True)]

    def unrolled(
        self,
        state_TH: Tensor,
        said: Said,
        rope: tuple[Tensor, Tensor],
        attention: AttendFn,
        asking_n: Tensor | None = None,
        lean: bool = False,
    ) -> Tensor:
        """`forward` for training: the outputs [1, n, H] of all slots, or of the `asking` ones; every slot makes keys
        and values. `lean`: hold less for the backward and make it again."""
        x, (q_weight, kv_weight) = self.hidden_norm(state_TH), said.of_state
        residual = picked(x if self.norm_before_residual else state_TH, asking_n, 0)
        with remade(x, lambda: self.hidden_norm(state_TH), lean):
            q = torch.addmm(said.q_nQ, picked(x, asking_n, 0), q_weight.T)
            kv = torch.addmm(said.kv_TK, x, kv_weight.T)
        k, v = kv.chunk(2, -1)  # a copy of v: the unroll keeps it, and a view would keep the keys before rotation too
        heads = self.self_attn.turned(q[None], k[None], v.contiguous()[None], rope, asking_n)
        return self._onward(residual[None], attention(*heads), lean)

    def _onward(self, residual: Tensor, mixed: Tensor, lean: bool = False) -> Tensor:
        h = residual + self.self_attn.o_proj(mixed)
        normed = self.post_attention_layernorm(h)
        with remade(normed, lambda: self.post_attention_layernorm(h), lean):
            out: Tensor = h + self.mlp(normed, lean)
        return out
