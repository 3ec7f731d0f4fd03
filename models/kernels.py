"""Which decoding kernels there are for a device."""

from types import ModuleType

import torch

from models.cache import KVCache

HEAD_SIZES = (16, 32, 64, 128, 256)
FEW_TOKENS = 64  # a row: up to here those of a CPU are for


def kernels(device: torch.device, dtype: torch.dtype, head_dim: int) -> ModuleType | None:
    """`models.fused` on a GPU, `models.host` on a CPU in fp32 where it compiles; None where the plain layers serve."""
    if head_dim not in HEAD_SIZES:
        return None
    if device.type == "cuda":
        from models import fused

        return fused
    if device.type == "cpu" and dtype == torch.float32:
        from models import host

        return host if host.library() is not None else None
    return None


def serve(cache: KVCache, tokens: int) -> bool:
    """Whether they are for a step of so many tokens a row: on a GPU for all, prompts too, on a CPU for few."""
    return cache.lengths.is_cuda or tokens <= FEW_TOKENS
