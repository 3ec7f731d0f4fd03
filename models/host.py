"""Decoding kernels for a CPU in fp32 (host.cpp), with the face of `models.fused`, those of a GPU.

They are compiled for this machine on first use and kept in the cache. Without a compiler the plain layers serve.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from models.attention import Heads
from models.cache import KVCache
from recipes.files import cache_dir

SOURCE = Path(__file__).with_name("host.cpp")
_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64


class _Shape(ctypes.Structure):
    _fields_ = [(n, _LONG) for n in ("T", "U", "N", "K", "capacity", "offset", "depth", "limit", "line")] + [
        (n, ctypes.c_float) for n in ("scale", "eps")
    ]


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they can't be compiled, which is told once.

    They are linked to no OpenMP of their own: the one that torch has loaded, with its threads, serves them.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    try:
        found = ctypes.CDLL(str(_compiled(compiler))) if compiler else None
    except (OSError, subprocess.SubprocessError):
        found = None
    if found is None:
        print("no C++ compiler with OpenMP (g++) here: decoding in fp32 takes about twice as long", file=sys.stderr)
        return None
    found.few_rows.argtypes = [_POINTER] * 3 + [_LONG] * 3 + [ctypes.c_int]
    found.add_norm.argtypes = [_POINTER] * 5 + [_LONG] * 2 + [ctypes.c_float]
    found.gated.argtypes = [_POINTER] * 2 + [_LONG] * 2
    found.attention.argtypes = [_POINTER] * 12 + [_LONG] * 2 + [ctypes.POINTER(_Shape), ctypes.c_int]
    return found


def _compiled(compiler: str) -> Path:
    processor = Path("/proc/cpuinfo")  # a cache may be shared by machines of several kinds
    flags = next((line for line in processor.read_text().splitlines() if line.startswith("flags")), "")
    key = hashlib.sha256(f"{SOURCE.read_text()}\n{platform.machine()}\n{flags}".encode()).hexdigest()[:16]
    target = cache_dir("kernels", f"host-{key}.so")
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = target.with_suffix(f".{os.getpid()}")
        options = ["-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-fPIC"]
        subprocess.run([compiler, *options, "-c", str(SOURCE), "-o", f"{aside}.o"], check=True, capture_output=True)
        subprocess.run([compiler, "-shared", f"{aside}.o", "-o", str(aside)], check=True, capture_output=True)
        Path(f"{aside}.o").unlink()
        aside.replace(target)
    return target


def _kernels() -> ctypes.CDLL:
    found = library()
    assert found is not None, "`models.kernels` comes first"
    return found


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T of contiguous tensors: [..., in] -> [..., out]."""
    out, size = x.new_empty(*x.shape[:-1], len(weight)), x.shape[-1]
    _kernels().few_rows(
        x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // size, size, len(weight), torch.get_num_threads()
    )
    return out


def add_norm(x: Tensor, delta: Tensor | None, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + delta, its RMS norm times `gain`) [..., H]; without `delta` x itself."""
    x, size = x.contiguous(), x.shape[-1]
    total, out = x if delta is None else torch.empty_like(x), torch.empty_like(x)
    _kernels().add_norm(
        x.data_ptr(), _pointer(delta), gain.data_ptr(), total.data_ptr(), out.data_ptr(), x.numel() // size, size, eps
    )
    return total, out


def gated(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [..., 2I] -> [..., I]."""
    size = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], size)
    _kernels().gated(gate_up.data_ptr(), out.data_ptr(), out.numel() // size, size)
    return out


def attention(
    qkv_BTX: Tensor,
    rope: tuple[Tensor, Tensor],
    depths: Tensor | int | None,
    cache: KVCache,
    layer: int,
    heads: Heads,
    ancestors_BTU: Tensor | None,
) -> Tensor:
    """`models.fused.attention`: norm, rotate, store and attend -> [B, T, N*D]."""
    B, T, _ = qkv_BTX.shape
    U = T if ancestors_BTU is None else ancestors_BTU.shape[2]
    each = depths.contiguous() if isinstance(depths, Tensor) else None
    queries, out = (qkv_BTX.new_empty(B, T, heads.queries * heads.size) for _ in range(2))
    shape = _Shape(
        T, U, heads.queries, heads.keys, cache.capacity, U - T, depths if isinstance(depths, int) else 0,
        len(rope[0]) - 1, depths is None, heads.scale, heads.eps,
    )  # fmt: skip
    arrays = (
        qkv_BTX, *rope, each, cache.lengths, heads.q_gain, heads.k_gain, cache.keys[layer], cache.values[layer],
        ancestors_BTU, queries, out,
    )  # fmt: skip
    wrong = _kernels().attention(*map(_pointer, arrays), B, heads.size, shape, torch.get_num_threads())
    assert not wrong, "`models.kernels` comes first"
    return out
