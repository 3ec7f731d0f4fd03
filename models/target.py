"""The frozen target: loaded through transformers, run on our own cache, exposing the states a drafter reads.

Layer numbering: `h[0]` is the embedding output, `h[L]` the residual stream after L decoder
layers, before the final norm. B batch, T positions, S key slots, H hidden, V vocabulary, C = len(taps) * H.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import lean
from models.attention import Documents, Heads, attend, attend_documents, half_on_gpu
from models.cache import KVCache
from models.device import choose_dtype
from models.kernels import kernels, serve
from models.linear import linear
from models.source import Source, load_model, load_tokenizer, resolve
from models.target_weights import Layer, Weights, Whole, affine, concatenate
from recipes.schema import TargetConfig, UserError

PREFILL_CHUNK = 2048  # positions of a prefill's forward, at most
PREFILL_CELLS = 1 << 25  # of its mask (rows x positions x context), at most

AttendFn = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # (layer, queries, keys, values) -> [B, T, N*D]
MixFn = Callable[[int, Tensor], Tensor]  # (layer, what its queries, keys and values are made of) -> [B, T, N*D]


@dataclass(frozen=True)
class States:
    """What one forward exposes: the taps side by side, low to high [B, T, C], and the final normed state [B, T, H]."""

    taps_BTC: Tensor
    final_BTH: Tensor


SeeFn = Callable[[slice, States], None]  # (positions of a chunk, their states)
SeeKeysFn = Callable[[int, Tensor, Tensor], None]  # (layer, keys, values [1, K, T, D])


class Target:
    """A causal language model of the Llama, Qwen2/3, Mistral or Gemma family, frozen."""

    def __init__(self, model: Any, tokenizer: Any, source: Source, taps: list[int] | None = None) -> None:
        self.model, self.tokenizer, self.fingerprint = model.eval().requires_grad_(False), tokenizer, source.fingerprint
        self.name, self.folder = source.name, source.folder
        self.config = config = model.config.get_text_config()
        self.n_layers, self.hidden_size, self.vocab_size = (
            config.num_hidden_layers,
            config.hidden_size,
            config.vocab_size,
        )
        self.n_heads, self.n_kv = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.max_positions = config.max_position_embeddings
        self.eps = config.rms_norm_eps
        self.taps = check_taps(taps, self.n_layers)
        self.eos_ids = source.eos_ids
        self.template_hash = source.template_hash
        self.window = getattr(config, "sliding_window", None)
        self.plus_one = config.model_type.startswith("gemma")  # Gemma's norms multiply by (1 + w)
        self.final_softcap = getattr(config, "final_logit_softcapping", None)
        body = model.get_decoder()
        self._embedding = body.embed_tokens
        self.final_norm = self._gain(body.norm)
        layers = [self._fuse(layer, i) for i, layer in enumerate(body.layers)]
        self.weights: Weights = Whole(layers, body.embed_tokens.weight, model.get_output_embeddings().weight)
        self.kinds = [layer.kind for layer in layers]
        self._rotary, self._tables = body.rotary_emb, {}  # type: Any, dict[str, tuple[Tensor, Tensor]]
        everywhere = all(la.kind == "full_attention" and la.softcap is None for la in layers)
        one_norm = "pre_feedforward_layernorm" not in layers[0].norms
        self.silu = getattr(config, "hidden_act", "") == "silu"
        self.plain = everywhere and one_norm and self.silu  # the kernels know such layers
        self.place(self.embed_weight.device)

    def place(self, device: torch.device) -> None:
        """Say where it runs."""
        self.device, self.dtype = device, self.final_norm.dtype
        self.kernels = kernels(self.device, self.dtype, self.head_dim) if self.plain else None

    def release(self, device: torch.device) -> None:
        """Let go of the model that it was made from, once `weights` holds none of its matrices."""
        self.model = None
        self._embedding.weight = nn.Parameter(self.final_norm.new_empty(0), requires_grad=False)
        self._embedding, self._rotary = self._embedding.to(device), self._rotary.to(device)
        self.final_norm = self.final_norm.to(device)
        self.place(device)

    @property
    def layers(self) -> Sequence[Layer]:
        return self.weights.layers

    @property
    def embed_weight(self) -> Tensor:
        return self.weights.embedding

    @property
    def head_weight(self) -> Tensor:
        return self.weights.head

    @property
    def sharded(self) -> bool:
        """Whether every forward is one of all processes: it can't be captured, and none may skip one."""
        return not isinstance(self.weights, Whole)

    def embed_tokens(self, ids: Tensor) -> Tensor:
        """What the first layer reads: the rows of `embed`, scaled as the family does."""
        scaled: Tensor = torch.func.functional_call(self._embedding, {"weight": self.embed_weight}, ids)
        return scaled

    def _gain(self, norm: nn.Module) -> Tensor:
        weight: Tensor = norm.get_parameter("weight").data
        return weight + 1 if self.plus_one else weight

    def _fuse(self, layer: Any, index: int) -> Layer:
        """Concatenate projections that read the same input; the model's own weights become views, so memory stays."""
        attn, mlp = layer.self_attn, layer.mlp
        qkv, bias = concatenate([attn.q_proj, attn.k_proj, attn.v_proj])
        gate_up, _ = concatenate([mlp.gate_proj, mlp.up_proj])
        named = {n: m for n, m in [*layer.named_children(), *attn.named_children()] if n.endswith("norm")}
        kinds = getattr(self.config, "layer_types", None)
        kind = kinds[index] if kinds else ("sliding_attention" if self.window else "full_attention")
        softcap = getattr(attn, "attn_logit_softcapping", None)
        norms = {n: self._gain(m) for n, m in named.items()}
        out, down = affine(attn.o_proj), affine(mlp.down_proj)
        return Layer(qkv, bias, out, gate_up, down, mlp.act_fn, norms, attn.scaling, softcap, kind)

    def norm(self, x: Tensor, gain: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):  # which on a GPU would hand on fp32
            return lean.rms_norm(x, gain, self.eps)
        return F.rms_norm(x, (gain.shape[0],), gain, self.eps)

    def rope(self, kind: str) -> tuple[Tensor, Tensor]:
        """Cosines and sines of every position [P, D]."""
        key = kind if hasattr(self._rotary, "layer_types") else ""
        if key not in self._tables:
            everywhere = torch.arange(self.max_positions, device=self.device).unsqueeze(0)
            extra = (key,) if key else ()
            cos, sin = self._rotary(self.final_norm, everywhere, *extra)
            self._tables[key] = (cos[0], sin[0])
        return self._tables[key]

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        return KVCache(self.n_layers, rows, self.n_kv, capacity, self.head_dim, self.device, self.dtype)

    @torch.no_grad()
    def forward(
        self,
        ids_BT: Tensor,
        cache: KVCache | None = None,
        depths_BT: Tensor | None = None,
        ancestors_BTT: Tensor | None = None,
    ) -> States:
        """Run new tokens after what `cache` holds (nothing, without one); the cache's lengths do not advance.

        A chain by default; for a tree give each token's depth below the last committed token's successor (root 0) and
        `ancestors[b, t, u]` = t sees u (itself included). Right padding is harmless in a chain: nothing real sees it.
        """
        B, T = ids_BT.shape
        if cache is not None and self.kernels and serve(cache, T):
            mix = self.fused_attention(self.kernels, depths_BT, cache, ancestors_BTT)
            return self._fused(self.kernels, self.embed_tokens(ids_BT), mix)
        depths = torch.arange(T, device=self.device).expand(B, T) if depths_BT is None else depths_BT
        start = cache.lengths.unsqueeze(1) if cache is not None else 0
        positions = (depths + start).clamp(max=self.max_positions - 1)
        masks = {kind: self.mask(kind, cache, positions, ancestors_BTT) for kind in {*self.kinds}}

        def attention(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            layer = self.layers[index]
            if cache is not None:
                cached = cache.write(index, k, v)
                k, v = (k, v) if cache.high == 0 else cached
            return attend(q, k, v, masks[layer.kind], layer.scale, layer.softcap)

        return self._run(ids_BT, positions, attention)

    def _run(self, ids_BT: Tensor, positions_BT: Tensor, attention: AttendFn) -> States:
        tables = {kind: self.rope(kind) for kind in {*self.kinds}}
        ropes = {kind: (cos[positions_BT], sin[positions_BT]) for kind, (cos, sin) in tables.items()}
        x = self.embed_tokens(ids_BT)
        states = [x] if 0 in self.taps else []
        for index, layer in enumerate(self.layers):
            x = self.run_layer(layer, index, x, ropes[layer.kind], attention)
            if index + 1 in self.taps:
                states.append(x)
        return States(torch.cat(states, -1), self.norm(x, self.final_norm))

    def _fused(self, fused: ModuleType, x: Tensor, mix: MixFn) -> States:
        """`_run` by the kernels of the device: the same layers, with fewer launches and less memory read."""
        states, delta = [], None  # type: list[Tensor], Tensor | None
        for index, layer in enumerate(self.layers):
            x, normed = fused.add_norm(x, delta, layer.norms["input_layernorm"], self.eps)
            if index in self.taps:
                states.append(x)
            x, delta = self.fused_layer(fused, index, x, normed, mix)
        return States(torch.cat(states, -1), fused.add_norm(x, delta, self.final_norm, self.eps)[1])

    def fused_layer(
        self, fused: ModuleType, index: int, x: Tensor, normed: Tensor, mix: MixFn
    ) -> tuple[Tensor, Tensor]:
        """The stream behind a layer's attention, from the stream before it and its norm, and what is to be added."""
        layer = self.layers[index]
        mixed = mix(index, linear(normed, layer.qkv, layer.qkv_bias))
        return layer.fused_rest(fused, x, linear(mixed, layer.out.weight, layer.out.bias), self.eps)

    def fused_attention(
        self, fused: ModuleType, depths: Tensor | None, cache: KVCache, ancestors_BTT: Tensor | None = None
    ) -> MixFn:
        """Over what `cache` holds and the new tokens."""
        rope = self.rope(self.kinds[0])
        seen = None if ancestors_BTT is None else ancestors_BTT.contiguous().view(torch.uint8)
        return lambda i, qkv: fused.attention(qkv, rope, depths, cache, i, self.heads(self.layers[i]), seen)

    def heads(self, layer: Layer) -> Heads:
        q_gain, k_gain = layer.norms.get("q_norm"), layer.norms.get("k_norm")
        return Heads(self.n_heads, self.n_kv, self.head_dim, layer.scale, self.eps, q_gain, k_gain)

    def mask(
        self, kind: str, cache: KVCache | None, positions_BT: Tensor, ancestors_BTT: Tensor | None
    ) -> Tensor | None:
        """[B, T, S] visibility, or None where plain causal attention over the new tokens alone says the same."""
        T, window = positions_BT.shape[1], self.window if kind == "sliding_attention" else None
        fresh = cache is None or cache.high == 0
        if fresh and ancestors_BTT is None and (window is None or window >= T):
            return None
        if ancestors_BTT is None:
            ancestors_BTT = (
                torch.ones(T, T, dtype=torch.bool, device=self.device).tril().expand(len(positions_BT), T, T)
            )
        if cache is None or fresh:
            mask, keys_BS = ancestors_BTT, positions_BT
        else:
            mask, keys_BS = cache.visible(ancestors_BTT), cache.positions(positions_BT)
        if window is not None:
            mask = mask & (positions_BT.unsqueeze(2) - keys_BS.unsqueeze(1) < window)
        return mask

    def run_layer(
        self, layer: Layer, index: int, x_BTH: Tensor, rope: tuple[Tensor, Tensor], attention: AttendFn
    ) -> Tensor:
        qkv = linear(self.norm(x_BTH, layer.norms["input_layernorm"]), layer.qkv, layer.qkv_bias)
        mixed = attention(index, *self.split_heads(qkv, layer.norms, rope))
        return self.finish(layer, x_BTH, linear(mixed, layer.out.weight, layer.out.bias))

    def split_heads(
        self, qkv_BTX: Tensor, norms: dict[str, Tensor], rope: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [B, N, T, D] and keys, and values [B, K, T, D], of projections that lie side by side; `norms`
        may hold the gains of q_norm and k_norm."""
        qkv = qkv_BTX.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = qkv.split([self.n_heads, self.n_kv, self.n_kv], dim=1)
        if "q_norm" in norms:
            q, k = self.norm(q, norms["q_norm"]), self.norm(k, norms["k_norm"])
        return lean.rotate(q, *rope), lean.rotate(k, *rope), v

    def finish(self, layer: Layer, x_BTH: Tensor, mixed_BTH: Tensor) -> Tensor:
        """The rest of a layer, from what its attention adds to its input."""
        norms = layer.norms
        if "pre_feedforward_layernorm" in norms:  # Gemma 2 and 3 norm both ends of each sublayer
            x = x_BTH + self.norm(mixed_BTH, norms["post_attention_layernorm"])
            return x + self.norm(
                self._mlp(layer, self.norm(x, norms["pre_feedforward_layernorm"])), norms["post_feedforward_layernorm"]
            )
        x = x_BTH + mixed_BTH
        return x + self._mlp(layer, self.norm(x, norms["post_attention_layernorm"]))

    def _mlp(self, layer: Layer, x: Tensor) -> Tensor:
        if x.requires_grad and self.silu:  # of masks that learn
            gate, up = (linear(x, weight) for weight in layer.gate_up.chunk(2))
            return linear(lean.gated(gate, up), layer.down.weight, layer.down.bias)
        gate, up = linear(x, layer.gate_up).chunk(2, dim=-1)
        return linear(layer.act(gate) * up, layer.down.weight, layer.down.bias)

    @torch.no_grad()
    def prefill(self, ids_BT: Tensor, lengths: list[int], cache: KVCache, see: SeeFn | None = None) -> States:
        """Fill an empty cache with right-padded prompts; the states of each row's last token, as if T were 1.

        It goes chunk by chunk, so that what is held does not grow with the square of the length; `see` is shown the
        positions of each chunk and their states, padding included.
        """
        B, T = ids_BT.shape
        ends, index = torch.tensor(lengths, device=self.device), torch.arange(B, device=self.device)
        last: States | None = None
        masked = not (self.kernels and serve(cache, T))
        chunk = max(1, min(PREFILL_CHUNK, PREFILL_CELLS // (B * T))) if masked else PREFILL_CHUNK
        for start in range(0, T, chunk):
            part = slice(start, min(start + chunk, T))
            cache.set_lengths([start] * B)
            states = self.forward(ids_BT[:, part], cache)
            place = (ends - 1 - start).clamp(0, part.stop - start - 1)
            found = States(states.taps_BTC[index, place].unsqueeze(1), states.final_BTH[index, place].unsqueeze(1))
            late = (ends > start).view(B, 1, 1)  # those of rows that ended before stay
            last = (
                found
                if last is None
                else States(
                    torch.where(late, found.taps_BTC, last.taps_BTC), torch.where(late, found.final_BTH, last.final_BTH)
                )
            )
            if see is not None:
                see(part, states)
        assert last is not None, "prompts have tokens"
        cache.set_lengths(lengths)
        return last

    def features(self, ids_BT: Tensor) -> States:
        """States of whole rows for training; right padding is harmless."""
        return self.forward(ids_BT)

    @torch.no_grad()
    def packed_features(self, ids_T: Tensor, documents: Documents, see: SeeKeysFn | None = None) -> States:
        """The same of a packed row, as a batch of one: each document as it would be alone. `see` is shown each layer's
        keys and values."""

        def attention(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            layer = self.layers[index]
            if see is not None:
                see(index, k, v)
            window = self.window if layer.kind == "sliding_attention" else None
            return attend_documents(q, k, v, documents, window, layer.scale, layer.softcap)

        ids_BT = ids_T.unsqueeze(0)
        positions_BT = documents.positions_T.clamp(max=self.max_positions - 1).unsqueeze(0)
        if not (self.kernels and half_on_gpu(self.final_norm)):
            return self._run(ids_BT, positions_BT, attention)
        cos, sin = self.rope(self.kinds[0])
        rope = cos[positions_BT], sin[positions_BT]

        def mix(index: int, qkv: Tensor) -> Tensor:
            return attention(index, *self.split_heads(qkv, self.layers[index].norms, rope))

        return self._fused(self.kernels, self.embed_tokens(ids_BT), mix)

    def logits(self, final: Tensor, head: Tensor | None = None) -> Tensor:
        """[..., H] -> [..., V], or by some rows of the head alone."""
        logits = linear(final, self.head_weight if head is None else head)
        return logits if self.final_softcap is None else self.final_softcap * torch.tanh(logits / self.final_softcap)

    def embed(self, ids: Tensor) -> Tensor:
        """Raw embedding rows, no family scaling: what engines hand a drafter."""
        return F.embedding(ids, self.embed_weight)


def padded(rows: list[list[int]], width: int = 0) -> Tensor:
    """Token ids right-padded by 0 to the longest row, or to a `width` that is wider: int64 [B, T], on the host."""
    out = torch.zeros(len(rows), max(width, *map(len, rows)), dtype=torch.int64)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.tensor(row, dtype=torch.int64)
    return out


def check_taps(taps: list[int] | None, n_layers: int, key: str = "target.taps") -> tuple[int, ...]:
    """The taps that `key` gives, or [2, n // 2, n - 3], ascending and distinct, in h[L] numbering."""
    chosen = tuple(taps) if taps else (2, n_layers // 2, n_layers - 3)
    if any(t < 0 or t >= n_layers for t in chosen):
        raise UserError(f"{key}={list(chosen)} must lie in 0..{n_layers - 1} for this target of {n_layers} layers")
    if sorted(set(chosen)) != list(chosen):
        raise UserError(
            f"the target has {n_layers} layers, so its taps {list(chosen)} collide or are out of order. "
            f"Give distinct ascending ones: {key}=[1,2,3]"
        )
    return chosen


def refuse_nan(logits_BV: Tensor) -> Tensor:
    """The logits, or UserError where a row has no highest one that is a number: its tokens would be noise."""
    if not bool(logits_BV.amax(-1).isfinite().all()):
        raise UserError(
            "the target's logits are not numbers (NaN or infinity): its weights are damaged, or they overflow in this "
            "dtype. Try target.dtype=float32 (and data.dtype=float32), or fetch the target again."
        )
    return logits_BV


def load_target(cfg: TargetConfig, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Target:
    """Load the target a recipe names. Raises UserError before weights load wherever the mistake can be seen there."""
    device = torch.device(device)
    source = resolve(cfg)
    check_taps(cfg.taps, source.n_layers)
    model = load_model(source, device, dtype or choose_dtype(cfg.dtype, device), cfg.trust_remote_code)
    return Target(model, load_tokenizer(source, cfg.trust_remote_code), source, cfg.taps)
