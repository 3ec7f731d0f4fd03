"""EAGLE-3 (arXiv 2503.01840): one decoder layer that drafts from three of the target's hidden states.

The whole drafter: its config, its layer, the training-time unroll and the cached steps of decoding. Equations and
tensor names are those that serving engines (vLLM, SGLang) read, the norms of EAGLE 3.1 and its like among them.

B batch, T slots, H hidden, N heads, K key-value heads, D head size, C = taps * H, V vocabulary, Vd draft vocabulary.
Slot p holds the features of x[0..p] and the embedding of x[p+1]; it predicts x[p+2]. A slot's *state* is what the next
step receives and the logits are made of: the layer's output, with `norm_output` after the final norm.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.attention import Documents, Heads, attend
from models.cache import KVCache
from models.capture import in_place
from models.eagle3_layer import Layer, RMSNorm, Said, Through, kept, picked
from models.kernels import kernels, serve
from models.linear import Linear, linear
from models.target import Target
from models.unroll_attention import Asking, causal_plus_diagonals
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


Made = tuple[Tensor, Tensor]  # the keys and values of one unroll step


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
        self.lm_head = Through(H, config.draft_vocab_size, bias=False)
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

    def into_head(self, state: Tensor, through: Callable[[Tensor, Tensor], Any]) -> Any:
        """`through` of what the head multiplies [..., H] and its weight [Vd, H]."""
        return self.lm_head(state if self.config.norm_output else self.norm(state), through)

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

    def _stated(self, out: Tensor) -> Tensor:
        """The state that the layer's output is to the next step."""
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
        self,
        taps_TC: Tensor,
        embed_UH: Tensor,
        steps: int,
        documents: Documents,
        asking: Sequence[Asking] | None = None,
        recompute: bool = False,
    ) -> Iterator[Tensor]:
        """Training-time test (EAGLE-3, section 3.2) over a packed row: the states [n, H] of each unroll step.

        `asking` names the n slots of each step whose states are wanted, each set within the one before; without it all
        T are. Step 0 needs keys and values of every slot, but all the rest of the work is that of the asking slots: a
        key that slot p makes at a later step is read by slot p alone.

        `embed` holds the embeddings of x[1], x[2], ..., U = T + steps - 1 of them or more: slot p reads that of
        x[p+1+i] at step i. What stands behind the end of a document reaches no slot whose own tokens x[p+1 .. p+1+i]
        lie inside. Step i sees the step-0 keys 0..p of the document and the keys that slot p itself made at steps
        1..i, at rotary phase p + i: what a chain of drafts sees when served. With `recompute` the backward runs each
        step again rather than keep what it held.
        """
        state, T = self.fuse(taps_TC), len(taps_TC)
        asks = [None] * steps if asking is None else [now.index_n for now in asking]
        queries = [slice(i, i + T) if index_n is None else index_n + i for i, index_n in enumerate(asks)]
        said = self.midlayer.said(embed_UH.to(state.dtype), queries, [slice(0, T), *queries[1:]])
        made: list[Made] = []
        for i in range(steps):
            now, at = None if asking is None else asking[i], documents.positions_T
            if now is not None and i > 0:
                state, at = picked(state, now.kept_n, 0), picked(at, now.index_n, 0)
                made = [*made[:1], *((kept(k, now.kept_n), kept(v, now.kept_n)) for k, v in made[1:])]
            rope = self._rope_at((at + i).unsqueeze(0), state.dtype)
            inputs = (state, said[i], rope, made, documents, now, not recompute)
            if recompute:
                state, k, v = checkpoint(self._unroll_step, *inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                state, k, v = self._unroll_step(*inputs)
            made = [*made, (k, v)]
            yield state

    def _unroll_step(
        self,
        state_TH: Tensor,
        said: Said,
        rope: tuple[Tensor, Tensor],
        made: list[Made],
        documents: Documents,
        asking: Asking | None,
        lean: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The asking slots' next states [n, H], and the step's keys and values [K, T, D]."""
        found: list[Tensor] = []

        def attention(q_1NnD: Tensor, k_1KTD: Tensor, v_1KTD: Tensor) -> Tensor:
            own = k_1KTD.squeeze(0), v_1KTD.squeeze(0)  # to index would write zeros for its gradient
            found.extend(own)
            (k, v), *diagonals = [*made, own]
            out_NnD = causal_plus_diagonals(q_1NnD.squeeze(0), k, v, diagonals, documents, asking)
            return out_NnD.transpose(0, 1).flatten(1).unsqueeze(0)

        asks = None if asking is None or made else asking.index_n
        out_1nH = self.midlayer.unrolled(state_TH, said, rope, attention, asks, lean)
        return self._stated(out_1nH.squeeze(0)), found[0], found[1]

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
        return self._stated(self.midlayer(state_BTH, embed_BTH.to(state_BTH.dtype), rope, attention))

    def pack(self) -> tuple[Tensor, Tensor]:
        """Lay the weights side by side that read the same input, for the kernels of the device. Call it when they
        change: the copies keep their place, since captured steps read them there."""
        attention, mlp = self.midlayer.self_attn, self.midlayer.mlp
        qkv = torch.cat([m.weight.detach() for m in (attention.q_proj, attention.k_proj, attention.v_proj)])
        gate_up = torch.cat([mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()])
        held = self._packed or (None, None)
        self._packed = in_place(held[0], qkv), in_place(held[1], gate_up)
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
