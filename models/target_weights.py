"""The weights of a frozen target as its forward reads them."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from models.linear import linear


class Affine(NamedTuple):
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class Layer:
    """One decoder layer's weights, q/k/v and gate/up fused; norms as plain gains."""

    qkv: Tensor
    qkv_bias: Tensor | None
    out: Affine
    gate_up: Tensor
    down: Affine
    act: nn.Module
    norms: dict[str, Tensor]
    scale: float
    softcap: float | None
    kind: str  # "full_attention" | "sliding_attention"

    def fused_rest(self, fused: ModuleType, x: Tensor, mixed: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """What follows attention, by the kernels of a device: the stream with what attention adds, and what is to be
        added to it next."""
        x, normed = fused.add_norm(x, mixed, self.norms["post_attention_layernorm"], eps)
        return x, linear(fused.gated(linear(normed, self.gate_up)), self.down.weight, self.down.bias)


class Weights(Protocol):
    """What a target multiplies by; the matrices of a sharded one (models/sharded.py) are made whole as they are read,
    and stay until others of their kind are."""

    @property
    def layers(self) -> Sequence[Layer]: ...
    @property
    def embedding(self) -> Tensor: ...
    @property
    def head(self) -> Tensor: ...


@dataclass(frozen=True)
class Whole:
    """All of them in this process."""

    layers: list[Layer]
    embedding: Tensor
    head: Tensor


def affine(module: nn.Linear) -> Affine:
    return Affine(module.weight.data, None if module.bias is None else module.bias.data)


def concatenate(modules: list[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    weight = torch.cat([module.weight.data for module in modules])
    biases = [module.bias for module in modules if module.bias is not None]
    offset = 0
    for module in modules:
        module.weight.data = weight[offset : offset + module.out_features]
        offset += module.out_features
    return weight, torch.cat([b.data for b in biases]) if biases else None
