"""EAGLE-3 (arXiv 2503.01840): one decoder layer that drafts from three of the target's hidden states.

The whole drafter: its config, its layer, the training-time unroll and the cached steps of decoding. Equations and
tensor names are those that serving engines (vLLM, SGLang) read, the norms of EAGLE 3.1 and its like among them.

B batch, T slots, H hidden, N heads, K key-value heads, D head size, C = taps * H, V vocabulary, Vd draft vocabulary.
Slot p holds the features of x[0..p] and the embedding of x[p+1]; it predicts x[p+2]. A slot's *state* is what the next
step receives and the logits are made of: the layer's output, with `norm_output` after the final norm.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention import Documents, Heads, attend, causal_plus_diagonals, rotate
from models.cache import KVCache
from models.kernels import kernels, serve
from models.linear import Linear, linear
from models.target import Target
from models.vocab import VocabMap


@dataclass(frozen=True)
class Eagle3Config:
    """Derived from the target's config; `taps` are in h[L] numbering. The flags are as engines understand them."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    draft_vocab_size: int
    max_position_embeddings: int
    rope_parameters: dict[str, Any]
    taps: tuple[int, ...]
    target_layers: int
    norm_before_residual: bool = False  # the residual stream starts from the normed state
    norm_before_fc: bool = False  # one norm over the taps side by side
    fc_norm: bool = False  # a norm for each tap
    norm_output: bool = False  # the next step receives the final-normed state
    qk_norm: bool = False  # queries and keys normed before rotation (a Qwen3 block)

    @staticmethod
    def from_target(target: Target, vocab: VocabMap, **flags: bool) -> "Eagle3Config":
        config = target.config
        rope = dict(getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0})
        rope = dict(rope.get("full_attention", rope))  # Gemma 3 keeps one set a layer type
        return Eagle3Config(
            hidden_size=target.hidden_size,
            intermediate_size=config.intermediate_size,
            num_attention_heads=target.n_heads,
            num_key_value_heads=target.n_kv,
            head_dim=target.head_dim,
            rms_norm_eps=target.eps,
            vocab_size=target.vocab_size,
            draft_vocab_size=vocab.size,
            max_position_embeddings=target.max_positions,
            rope_parameters=rope,
            taps=target.taps,
            target_layers=target.n_layers,
            **flags,
        )


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        # in fp32 whatever the stream's dtype: under autocast the stream is bf16 and the gain fp32
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), self.weight.shape, self.weight.to(wide), self.eps).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c: Eagle3Config) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.q_proj = Linear(2 * c.hidden_size, self.heads * c.head_dim, bias=False)
        self.k_proj = Linear(2 * c.hidden_size, self.kv_heads * c.head_dim, bias=False)
        self.v_proj = Linear(2 * c.hidden_size, self.kv_heads * c.head_dim, bias=False)
        self.o_proj = Linear(self.heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else None

    def project(self, x_BTX: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [B, N, T, D] and keys, and values [B, K, T, D]."""
        q, k, v = (
            linear(x_BTX).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, *rope), rotate(k, *rope), v


class MLP(nn.Module):
    def __init__(self, c: Eagle3Config) -> None:
        super().__init__()
        self.gate_proj = Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


AttendFn = Callable[[Tensor, Tensor, Tensor], Tensor]  # (q, k, v) -> [B, T, N*D]


class Layer(nn.Module):
    """Attention reads [normed embedding ; normed state]; the residual stream starts from the un-normed state, or from
    the normed one with `norm_before_residual`."""

    def __init__(self, c: Eagle3Config) -> None:
        super().__init__()
        self.norm_before_residual = c.norm_before_residual
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.mlp = MLP(c)

    def forward(self, state_BTH: Tensor, embed_BTH: Tensor, rope: tuple[Tensor, Tensor], attention: AttendFn) -> Tensor:
        normed_BTH = self.hidden_norm(state_BTH)
        x = torch.cat((self.input_layernorm(embed_BTH), normed_BTH), dim=-1)
        residual_BTH = normed_BTH if self.norm_before_residual else state_BTH
        h = residual_BTH + self.self_attn.o_proj(attention(*self.self_attn.project(x, rope)))
        out: Tensor = h + self.mlp(self.post_attention_layernorm(h))
        return out


class Eagle3(nn.Module):
    """The drafter. Its embedding is the target's raw table, shared and frozen, so callers pass embeddings in."""

    def __init__(self, config: Eagle3Config, vocab: VocabMap) -> None:
        super().__init__()
        self.config, self.vocab = config, vocab
        H, eps, taps = config.hidden_size, config.rms_norm_eps, len(config.taps)
        self.input_norm = RMSNorm(taps * H, eps) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList([RMSNorm(H, eps) for _ in config.taps]) if config.fc_norm else None
        self.fc = Linear(taps * H, H, bias=False)
        self.midlayer = Layer(config)
        self.norm = RMSNorm(H, eps)
        self.lm_head = Linear(H, config.draft_vocab_size, bias=False)
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._packed: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def init_from_target(self, target: Target) -> None:
        """Start where the target ends: its final norm, its head's rows of the kept tokens, its last layer for the state
        half of the attention's input (the embedding half small and random), and fc passing the top tap through."""
        c, layer = self.config, target.layers[-1]
        self.lm_head.weight.copy_(target.head_weight[self.vocab.kept_ids.to(target.device)])
        self.norm.weight.copy_(target.final_norm)
        nn.init.normal_(self.fc.weight, std=0.02)
        self.fc.weight[:, -c.hidden_size :] += torch.eye(c.hidden_size, device=self.fc.weight.device)
        attention, mlp = self.midlayer.self_attn, self.midlayer.mlp
        sizes = [c.num_attention_heads * c.head_dim, *[c.num_key_value_heads * c.head_dim] * 2]
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        for projection, weight in zip(projections, layer.qkv.split(sizes), strict=True):
            nn.init.normal_(projection.weight, std=0.02)
            projection.weight[:, c.hidden_size :] = weight
        attention.o_proj.weight.copy_(layer.out.weight)
        gate, up = layer.gate_up.chunk(2)
        mlp.gate_proj.weight.copy_(gate)
        mlp.up_proj.weight.copy_(up)
        mlp.down_proj.weight.copy_(layer.down.weight)
        for own, name in ((attention.q_norm, "q_norm"), (attention.k_norm, "k_norm")):
            if own is not None and name in layer.norms:
                own.weight.copy_(layer.norms[name])
        before_mlp = layer.norms.get("pre_feedforward_layernorm", layer.norms["post_attention_layernorm"])
        self.midlayer.hidden_norm.weight.copy_(layer.norms["input_layernorm"])
        self.midlayer.post_attention_layernorm.weight.copy_(before_mlp)

    def logits(self, state: Tensor) -> Tensor:
        """[..., H] -> [..., Vd]."""
        out: Tensor = self.lm_head(state if self.config.norm_output else self.norm(state))
        return out

    def fused_logits(self, state: Tensor) -> Tensor:
        """`logits` by the kernels of a GPU."""
        from models import fused

        if not self.config.norm_output:
            state = fused.add_norm(state.contiguous(), None, self.norm.weight, self.config.rms_norm_eps)[1]
        return F.linear(state, self.lm_head.weight)

    def fuse(self, taps: Tensor) -> Tensor:
        """[..., C] -> [..., H]."""
        if self.fc_norm is not None:
            parts = taps.chunk(len(self.fc_norm), -1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        if self.input_norm is not None:
            taps = self.input_norm(taps)
        out: Tensor = self.fc(taps)
        return out

    def _layer(self, state: Tensor, embed: Tensor, rope: tuple[Tensor, Tensor], attention: AttendFn) -> Tensor:
        """The next state [B, T, H]."""
        out: Tensor = self.midlayer(state, embed.to(state.dtype), rope, attention)
        return self.norm(out) if self.config.norm_output else out

    def _rope(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines of every position [P, D]."""
        if device not in self._tables:
            from transformers import LlamaConfig
            from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

            fields = asdict(self.config)
            names = ("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings", "rope_parameters")
            rotary = LlamaRotaryEmbedding(LlamaConfig(**{n: fields[n] for n in names}))
            everywhere = torch.arange(self.config.max_position_embeddings + 64).unsqueeze(0)
            cos, sin = rotary(torch.zeros(1), everywhere)
            self._tables[device] = (cos[0].to(device), sin[0].to(device))
        return self._tables[device]

    def _rope_at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        cos, sin = self._rope(positions.device)
        return cos[positions].to(dtype), sin[positions].to(dtype)

    def unroll(
        self, taps_TC: Tensor, next_embed: Callable[[int], Tensor], steps: int, documents: Documents
    ) -> Iterator[Tensor]:
        """Training-time test (EAGLE-3, section 3.2) over a packed row: the states [T, H] of each unroll step.

        `next_embed(i)` gives the embeddings [T, H] of x[p+1+i] for every slot p; what it gives past the end of a
        document reaches no slot whose own tokens x[p+1 .. p+1+i] lie inside. Step i sees the step-0 keys 0..p of the
        document and the keys that slot p itself made at steps 1..i, at rotary phase p + i: what a chain of drafts sees
        when served.
        """
        state_1TH = self.fuse(taps_TC).unsqueeze(0)
        first: list[Tensor] = []
        diagonals: list[tuple[Tensor, Tensor]] = []

        def attention(q_1NTD: Tensor, k_1KTD: Tensor, v_1KTD: Tensor) -> Tensor:
            k, v = k_1KTD[0], v_1KTD[0]
            if first:
                diagonals.append((k, v))
            else:
                first.extend((k, v))
            out_NTD = causal_plus_diagonals(q_1NTD[0], first[0], first[1], diagonals, documents)
            return out_NTD.transpose(0, 1).flatten(1).unsqueeze(0)

        for i in range(steps):
            rope = self._rope_at((documents.positions_T + i).unsqueeze(0), state_1TH.dtype)
            state_1TH = self._layer(state_1TH, next_embed(i).unsqueeze(0), rope, attention)
            yield state_1TH[0]

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        c, weight = self.config, self.fc.weight
        return KVCache(1, rows, c.num_key_value_heads, capacity, c.head_dim, weight.device, weight.dtype)

    @torch.no_grad()
    def step(
        self,
        state_BTH: Tensor,
        embed_BTH: Tensor,
        cache: KVCache,
        depth: int | None = None,
        ancestors_BTU: Tensor | None = None,
    ) -> Tensor:
        """One cached pass -> states [B, T, H]; cache lengths do not advance.

        Without `ancestors` the T slots continue the row as a chain (committed tokens). With it they are nodes of a
        draft tree, `depth` steps below the last committed slot's own prediction; of the U uncommitted ones they come
        last.
        """
        B, T, _ = state_BTH.shape
        fused = kernels(state_BTH.device, state_BTH.dtype, self.config.head_dim) if self._packed is not None else None
        if fused and serve(cache, T):
            return self._fused_step(fused, state_BTH, embed_BTH, cache, depth, ancestors_BTU)
        if ancestors_BTU is None:
            ancestors_BTU = torch.ones(T, T, dtype=torch.bool, device=state_BTH.device).tril().expand(B, T, T)
            positions = cache.lengths.unsqueeze(1) + torch.arange(T, device=state_BTH.device)
        else:
            positions = (cache.lengths.unsqueeze(1) + (depth or 0)).expand(B, T)
        offset = ancestors_BTU.shape[2] - T
        mask = cache.visible(ancestors_BTU)

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = cache.write(0, k, v, offset)
            return attend(q, k, v, mask, q.shape[-1] ** -0.5)

        rope = self._rope_at(positions.clamp(max=self.config.max_position_embeddings + 63), state_BTH.dtype)
        return self._layer(state_BTH, embed_BTH, rope, attention)

    def pack(self) -> tuple[Tensor, Tensor]:
        """Lay the weights side by side that read the same input, for the kernels of the device. Call it when they
        change: the copies keep their place, since captured steps read them there."""
        attention, mlp = self.midlayer.self_attn, self.midlayer.mlp
        qkv = torch.cat([m.weight.detach() for m in (attention.q_proj, attention.k_proj, attention.v_proj)])
        gate_up = torch.cat([mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()])
        if self._packed is None or (self._packed[0].dtype, self._packed[0].device) != (qkv.dtype, qkv.device):
            self._packed = qkv, gate_up
        for kept, new in zip(self._packed, (qkv, gate_up), strict=True):
            kept.copy_(new)
        return self._packed

    def _fused_step(
        self,
        fused: ModuleType,
        state_BTH: Tensor,
        embed_BTH: Tensor,
        cache: KVCache,
        depth: int | None,
        ancestors_BTU: Tensor | None,
    ) -> Tensor:
        """`step` by the kernels of the device: the same layer, with fewer launches."""
        assert self._packed is not None
        c, layer, (qkv, gate_up) = self.config, self.midlayer, self._packed
        state_BTH = state_BTH.contiguous()
        _, embed = fused.add_norm(embed_BTH.to(state_BTH.dtype), None, layer.input_layernorm.weight, c.rms_norm_eps)
        _, state = fused.add_norm(state_BTH, None, layer.hidden_norm.weight, c.rms_norm_eps)
        gains = [None if n is None else n.weight for n in (layer.self_attn.q_norm, layer.self_attn.k_norm)]
        heads = Heads(
            c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.head_dim**-0.5, c.rms_norm_eps, *gains
        )
        seen = None if ancestors_BTU is None else ancestors_BTU.to(torch.uint8).contiguous()
        place = None if ancestors_BTU is None else depth or 0
        mixed = linear(torch.cat((embed, state), -1), qkv)
        mixed = fused.attention(mixed, self._rope(qkv.device), place, cache, 0, heads, seen)
        gain, residual = layer.post_attention_layernorm.weight, state if c.norm_before_residual else state_BTH
        h, normed = fused.add_norm(residual, layer.self_attn.o_proj(mixed), gain, c.rms_norm_eps)
        down: Tensor = layer.mlp.down_proj(fused.gated(linear(normed, gate_up)))
        return fused.add_norm(h, down, self.norm.weight, c.rms_norm_eps)[1] if c.norm_output else h + down
