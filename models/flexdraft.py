"""FlexDraft (arXiv 2605.20022): the target's last layers draft a block, with attention of their own for mask tokens.

A group of `block_size` masks stands behind a visible token a: mask j at position a + 1 + j. Mask 0 is at the slot of
the token that the target says itself (the bonus token) and predicts nothing; masks 1, 2, ... predict the tokens at
their own slots. Masks enter at the split layer as one learned vector, use draft copies of q, k, v, o (and of the norms
of q and k) and the target's own feed-forward blocks and norms. They see the tokens up to a and their whole group, both
ways; no token and no other group sees them. Structure: the method's public inference code; how it is trained is ours.

B batch, T tokens of a packed row, R mask rows, S key slots, H hidden, N heads, K key-value heads, D head size.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from models import flex_fused, flex_lora
from models.attention import attend
from models.cache import KVCache
from models.capture import in_place
from models.flex_groups import Groups, attend_groups
from models.linear import Linear, linear
from models.packed import Keys
from models.target import AttendFn, Target
from models.target_weights import Affine, Layer
from recipes.schema import UserError


@dataclass(frozen=True)
class FlexDraftConfig:
    """Sizes are the target's; layers split_layer .. target_layers - 1 have draft copies."""

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    target_layers: int
    split_layer: int
    block_size: int
    qkv_bias: bool
    out_bias: bool
    qk_norm: bool
    calibrator_rank: int  # 0 = no calibrator
    lora_rank: int = 0  # 0 = full copies
    inner_size: int = 0  # of copies of the feed-forward blocks, which go with copies of the layers' norms; 0 = none
    four_norms: bool = False  # of such a layer (Gemma 2 and 3); else two

    @staticmethod
    def from_target(
        target: Target, layers: int, block_size: int, calibrator_rank: int = 0, lora_rank: int = 0, whole: bool = False
    ) -> "FlexDraftConfig":
        """With draft copies in the last `layers` layers, or a third of them for 0."""
        check_layers(layers, target.n_layers)
        layers = layers or default_layers(target.n_layers)
        first = target.layers[0]
        return FlexDraftConfig(
            hidden_size=target.hidden_size,
            num_attention_heads=target.n_heads,
            num_key_value_heads=target.n_kv,
            head_dim=target.head_dim,
            rms_norm_eps=target.eps,
            vocab_size=target.vocab_size,
            target_layers=target.n_layers,
            split_layer=target.n_layers - layers,
            block_size=block_size,
            qkv_bias=first.qkv_bias is not None,
            out_bias=first.out.bias is not None,
            qk_norm="q_norm" in first.norms,
            calibrator_rank=calibrator_rank,
            lora_rank=lora_rank,
            inner_size=first.gate_up.shape[0] // 2 if whole else 0,
            four_norms=whole and "pre_feedforward_layernorm" in first.norms,
        )


def default_layers(target_layers: int) -> int:
    """Tuned layers where a recipe names no number."""
    return max(1, round(target_layers / 3))


def check_layers(layers: int, target_layers: int) -> None:
    if not 0 <= layers <= target_layers:
        raise UserError(f"flex.layers={layers} is out of range: this target has {target_layers} layers")


class DraftBlock(nn.Module):
    """Copies of a layer's feed-forward block and norms, where masks have these too."""

    def __init__(self, c: FlexDraftConfig) -> None:
        super().__init__()
        between = ("pre_feedforward_layernorm", "post_feedforward_layernorm") if c.four_norms else ()
        names = ("input_layernorm", "post_attention_layernorm", *between)
        self.norms = nn.ParameterDict({name: nn.Parameter(torch.ones(c.hidden_size)) for name in names})
        self.gate_up = nn.Linear(c.hidden_size, 2 * c.inner_size, bias=False)
        self.down = nn.Linear(c.inner_size, c.hidden_size, bias=False)

    def copy_from(self, layer: Layer) -> None:
        if layer.down.bias is not None:
            raise UserError("flex.parametrisation=layers: this target's feed-forward blocks have biases. Use full")
        self.gate_up.weight.copy_(layer.gate_up)
        self.down.weight.copy_(layer.down.weight)
        for name, gain in self.norms.items():
            gain.copy_(layer.norms[name])

    def over(self, layer: Layer, dtype: torch.dtype) -> Layer:
        gains = {name: gain.to(dtype) for name, gain in self.norms.items()}
        down = Affine(self.down.weight, None)
        return replace(layer, gate_up=self.gate_up.weight, down=down, norms=layer.norms | gains)


class DraftAttention(nn.Module):
    """What masks use instead of a layer's own projections, or of all of it; gains multiply as they stand, in all
    families."""

    def __init__(self, c: FlexDraftConfig) -> None:
        super().__init__()
        wide, narrow = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = Linear(c.hidden_size, wide, bias=c.qkv_bias)
        self.k_proj = Linear(c.hidden_size, narrow, bias=c.qkv_bias)
        self.v_proj = Linear(c.hidden_size, narrow, bias=c.qkv_bias)
        self.o_proj = Linear(wide, c.hidden_size, bias=c.out_bias)
        self.q_norm = nn.Parameter(torch.ones(c.head_dim)) if c.qk_norm else None
        self.k_norm = nn.Parameter(torch.ones(c.head_dim)) if c.qk_norm else None
        self.block = DraftBlock(c) if c.inner_size else None
        self.packed: tuple[Tensor, Tensor | None] | None = None

    @torch.no_grad()
    def copy_from(self, layer: Layer) -> None:
        parts: list[Any] = [self.q_proj, self.k_proj, self.v_proj, self.o_proj]
        sizes = [part.out_features for part in parts[:3]]
        for part, weight in zip(parts, [*layer.qkv.split(sizes), layer.out.weight], strict=True):
            part.weight.copy_(weight)  # an adapter's is that of the projection under it
        if layer.qkv_bias is not None:
            for part, bias in zip(parts[:3], layer.qkv_bias.split(sizes), strict=True):
                part.bias.copy_(bias)
        if layer.out.bias is not None:
            parts[3].bias.copy_(layer.out.bias)
        if self.q_norm is not None and self.k_norm is not None:
            self.q_norm.copy_(layer.norms["q_norm"])
            self.k_norm.copy_(layer.norms["k_norm"])
        if self.block is not None:
            self.block.copy_from(layer)

    def rest(self, layer: Layer, dtype: torch.dtype) -> Layer:
        """What masks use of a layer besides its attention."""
        return layer if self.block is None else self.block.over(layer, dtype)

    def pack(self) -> None:
        """Lay q, k and v side by side for the kernels of a GPU; again when they have changed."""
        parts: list[Any] = [self.q_proj, self.k_proj, self.v_proj]
        weight, bias = self.packed or (None, None)
        weight = in_place(weight, torch.cat([part.weight.detach() for part in parts]))
        if parts[0].bias is not None:
            bias = in_place(bias, torch.cat([part.bias.detach() for part in parts]))
        self.packed = weight, bias

    def project(self, x_BRH: Tensor) -> Tensor:
        return torch.cat((self.q_proj(x_BRH), self.k_proj(x_BRH), self.v_proj(x_BRH)), -1)

    def gains(self, dtype: torch.dtype) -> dict[str, Tensor]:
        if self.q_norm is None or self.k_norm is None:
            return {}
        return {"q_norm": self.q_norm.to(dtype), "k_norm": self.k_norm.to(dtype)}


Through = Callable[[Tensor, Tensor, Tensor], Any]


class Outer(Linear):
    """A linear map whose weights are also lent: ZeRO-3 gathers them for the time of a module's own forward."""

    def forward(self, code: Tensor, through: Through | None = None) -> Any:
        return super().forward(code) if through is None else through(code, self.weight, self.bias)


class Calibrator(nn.Module):
    """Corrects the masks' logits once the bonus token is known, which they were computed without: an MLP on [embedding
    of the bonus token ; final normed state of the mask], added to the frozen head's logits. It starts from zero."""

    def __init__(self, hidden_size: int, rank: int, vocab_size: int) -> None:
        super().__init__()
        self.inner = Linear(2 * hidden_size, rank)
        self.outer = Outer(rank, vocab_size)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    def forward(self, bonus: Tensor, state: Tensor, through: Through | None = None) -> Any:
        """[..., H], [..., H] -> [..., V], or what `through` makes of the code [..., r] that logits are made of, and of
        the weight [V, r] and bias [V] that make them."""
        code = nn.functional.silu(self.inner(torch.cat((bonus.to(state.dtype), state), -1)))
        return self.outer(code, through)


class FlexDraft(nn.Module):
    """All that is trained; the target is handed in, and stays as it is."""

    def __init__(self, config: FlexDraftConfig) -> None:
        super().__init__()
        self.config = config
        self.mask = nn.Parameter(torch.zeros(config.hidden_size))
        self.layers = nn.ModuleList(DraftAttention(config) for _ in range(config.target_layers - config.split_layer))
        rank = config.calibrator_rank
        self.calibrator = Calibrator(config.hidden_size, rank, config.vocab_size) if rank else None
        if config.lora_rank:
            flex_lora.inject(self.layers, config.lora_rank)

    def merged(self) -> "FlexDraft":
        """The same with full copies, as it decodes; itself where it has no adapters."""
        if not self.config.lora_rank:
            return self
        plain = FlexDraft(replace(self.config, lora_rank=0))
        rest = {name: t for name, t in self.state_dict().items() if not name.startswith("layers.")}
        plain.load_state_dict(rest | {f"layers.{name}": t for name, t in flex_lora.merged(self.layers).items()})
        return plain.to(self.mask.device).eval()

    def pack(self, target: Target) -> None:
        """Before decoding, and again when weights have changed."""
        for layer in self.layers if flex_fused.serve(self, target) else ():
            assert isinstance(layer, DraftAttention)
            layer.pack()

    def uncalibrated(self) -> "FlexDraft":
        """The same masks, a copy, without the calibrator."""
        bare = FlexDraft(replace(self.config, calibrator_rank=0))
        bare.load_state_dict({name: t for name, t in self.state_dict().items() if not name.startswith("calibrator.")})
        return bare.to(self.mask.device, self.mask.dtype).eval()

    @torch.no_grad()
    def init_from_target(self, target: Target, rows: Sequence[Tensor]) -> None:
        """Projections are the target's; the mask vector is the mean of its stream at the split layer over `rows` of
        token ids, without their first tokens, whose states are many times larger than any other's."""
        self.copy_from(target)
        probe = copy.copy(target)
        probe.taps = (self.config.split_layer,)
        states = [probe.features(ids.unsqueeze(0).to(target.device)).taps_BTC[0, 1:] for ids in rows]
        self.mask.copy_(torch.cat(states).float().mean(0))

    def copy_from(self, target: Target) -> None:
        """Projections, and gains, of the target."""
        for own, layer in zip(self.layers, target.layers[self.config.split_layer :], strict=True):
            assert isinstance(own, DraftAttention)
            own.copy_from(layer)

    def run(self, target: Target, positions_BR: Tensor, attention: AttendFn) -> Tensor:
        """Final normed states of masks at these positions [B, R, H]; `attention` as `Target` asks it."""
        positions_BR = positions_BR.clamp(max=target.max_positions - 1)
        split = self.config.split_layer
        tables = {la.kind: target.rope(la.kind) for la in target.layers[split:]}
        ropes = {kind: (cos[positions_BR], sin[positions_BR]) for kind, (cos, sin) in tables.items()}
        x = self.mask.to(target.dtype).expand(*positions_BR.shape, -1)
        for index, (own, layer) in enumerate(zip(self.layers, target.layers[split:], strict=True), split):
            assert isinstance(own, DraftAttention)
            rest = own.rest(layer, x.dtype)
            qkv = own.project(target.norm(x, rest.norms["input_layernorm"]))
            heads = target.split_heads(qkv, own.gains(qkv.dtype), ropes[layer.kind])
            x = target.finish(rest, x, own.o_proj(attention(index, *heads)))
        return target.norm(x, target.final_norm)

    def groups(self, target: Target, keys: Keys, groups: Groups) -> Tensor:
        """Training: final normed states of all masks of a packed row [R, H], from the target's keys and values of that
        row. Groups do not see each other, and no gradient reaches the target's part."""

        def attention(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            layer = target.layers[index]
            window = target.window if layer.kind == "sliding_attention" else None
            q, k, v = (x.squeeze(0) for x in (q, k, v))  # to index would write zeros for its gradient
            out_RX = attend_groups(q, (k, v), keys[index], groups, layer.scale, layer.softcap, window)
            return out_RX.unsqueeze(0)

        return self.run(target, groups.positions_R.unsqueeze(0), attention).squeeze(0)

    @torch.no_grad()
    def block(self, target: Target, cache: KVCache) -> Tensor:
        """Decoding: final normed states [B, block_size, H] of a group behind each row's committed tokens. Nothing is
        written: the masks' keys and values are gone afterwards."""
        if flex_fused.ready(self, target) and self.config.block_size <= flex_fused.ROOM:
            return flex_fused.block(self, target, fused_of(target), cache)
        size, device = self.config.block_size, target.device
        positions = cache.lengths.unsqueeze(1) + torch.arange(size, device=device)
        slot = torch.arange(cache.span(0), device=device)
        committed = (slot < cache.lengths.unsqueeze(1)).unsqueeze(1).expand(-1, size, -1)
        own = torch.ones(cache.rows, size, size, dtype=torch.bool, device=device)

        def attention(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            layer = target.layers[index]
            seen = committed
            if layer.kind == "sliding_attention" and target.window is not None:
                seen = seen & (positions.unsqueeze(2) - slot < target.window)
            k = torch.cat((cache.keys[index, :, :, : len(slot)], k), 2)
            v = torch.cat((cache.values[index, :, :, : len(slot)], v), 2)
            return attend(q, k, v, torch.cat((seen, own), 2), layer.scale, layer.softcap)

        return self.run(target, positions, attention)

    @torch.no_grad()
    def verify(self, target: Target, ids_BT: Tensor, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Decoding, two jobs in one forward: the target's final normed states [B, T, H] of new tokens behind the
        committed ones, as `Target.forward` writes and says them, and those of a group behind each of these
        [B, T, block_size, H], which sees the new tokens up to its own."""
        if flex_fused.ready(self, target):
            return flex_fused.verify(self, target, fused_of(target), ids_BT, cache)
        B, T = ids_BT.shape
        size, split, device = self.config.block_size, self.config.split_layer, target.device
        positions = cache.lengths.unsqueeze(1) + torch.arange(T, device=device)
        behind = (positions.unsqueeze(2) + torch.arange(1, size + 1, device=device)).flatten(1)
        sight = _Sight(target, cache, positions, behind, size)
        x = target.embed_tokens(ids_BT)
        for index, layer in enumerate(target.layers[:split]):
            x = target.run_layer(layer, index, x, sight.ropes[layer.kind], sight.tokens)
        y = self.mask.to(x.dtype).expand(B, T * size, -1)
        for index, (own, layer) in enumerate(zip(self.layers, target.layers[split:], strict=True), split):
            assert isinstance(own, DraftAttention)
            rest = own.rest(layer, x.dtype)
            qkv = linear(target.norm(x, layer.norms["input_layernorm"]), layer.qkv, layer.qkv_bias)
            mixed = sight.tokens(index, *target.split_heads(qkv, layer.norms, sight.ropes[layer.kind]))
            qkv = own.project(target.norm(y, rest.norms["input_layernorm"]))
            heads = target.split_heads(qkv, own.gains(qkv.dtype), sight.mask_ropes[layer.kind])
            both = linear(mixed, layer.out.weight, layer.out.bias), own.o_proj(sight.masks(index, *heads))
            if rest is layer:  # one product serves both kinds of rows
                x, y = target.finish(layer, torch.cat((x, y), 1), torch.cat(both, 1)).split([T, T * size], 1)
            else:
                x, y = target.finish(layer, x, both[0]), target.finish(rest, y, both[1])
        final = target.norm(torch.cat((x, y), 1), target.final_norm)
        return final[:, :T], final[:, T:].unflatten(1, (T, size))

    def logits(self, target: Target, states_BLH: Tensor, bonus_B: Tensor) -> Tensor:
        """Of masks' states behind each row's bonus token [B, L, V]: the head's, calibrated where that is learned."""
        logits = target.logits(states_BLH)
        if self.calibrator is None:
            return logits
        bonus = target.embed(bonus_B).unsqueeze(1).expand_as(states_BLH)
        return logits + self.calibrator(bonus, states_BLH)


def fused_of(target: Target) -> ModuleType:
    assert target.kernels is not None
    return target.kernels


class _Sight:
    """What new tokens and the groups behind each of them see in one forward, as attention of a layer."""

    def __init__(self, target: Target, cache: KVCache, positions_BT: Tensor, behind_BR: Tensor, size: int) -> None:
        self.target, self.cache = target, cache
        B, T = positions_BT.shape
        kinds = {la.kind for la in target.layers}
        last = target.max_positions - 1
        tables = {kind: target.rope(kind) for kind in kinds}
        at, far = positions_BT.clamp(max=last), behind_BR.clamp(max=last)
        self.ropes = {kind: (cos[at], sin[at]) for kind, (cos, sin) in tables.items()}
        self.mask_ropes = {kind: (cos[far], sin[far]) for kind, (cos, sin) in tables.items()}
        self._tokens = {kind: target.mask(kind, cache, at, None) for kind in kinds}
        slot = torch.arange(cache.span(T), device=positions_BT.device)
        seen = slot <= positions_BT.repeat_interleave(size, 1).unsqueeze(2)  # [B, R, S]
        group = torch.arange(T, device=slot.device).repeat_interleave(size)
        own = (group.unsqueeze(1) == group).expand(B, -1, -1)
        near = behind_BR.unsqueeze(2) - slot < (target.window or 0)
        self._masks = {
            kind: torch.cat((seen & near if kind == "sliding_attention" and target.window else seen, own), 2)
            for kind in kinds
        }

    def tokens(self, index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layer = self.target.layers[index]
        return attend(q, *self.cache.write(index, k, v), self._tokens[layer.kind], layer.scale, layer.softcap)

    def masks(self, index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """After `tokens` of the same layer, whose keys it reads."""
        layer, wide = self.target.layers[index], self._masks[self.target.layers[index].kind]
        span = wide.shape[2] - k.shape[2]
        k = torch.cat((self.cache.keys[index, :, :, :span], k), 2)
        v = torch.cat((self.cache.values[index, :, :, :span], v), 2)
        return attend(q, k, v, wide, layer.scale, layer.softcap)
