"""Where a command runs, and in which precision."""

import os

import torch

from recipes.schema import UserError


def choose_device(name: str = "auto") -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda, but torch sees no GPU here. Use device=cpu or leave it at auto.")
    return torch.device(name)


def local_device(name: str) -> torch.device:
    """The GPU that accelerate will give this process, known before accelerate is asked."""
    device = choose_device(name)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
    if name not in dtypes:
        raise UserError(f"dtype {name!r} is not one of auto, {', '.join(dtypes)}")
    return dtypes[name]
