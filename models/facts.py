"""What a drafter's folder says of itself: config, tensor headers, papers. Nothing in it is run or unpickled.

Only files of the folder itself are looked at, never those below. Weights are read when they are asked for
(`with_weights`), one tensor at a time. What cannot be read is kept as a line in `unreadable`.
"""

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from models.source import Source

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
MAP_ENTRIES = 1 << 22  # of a vocabulary map that is read; no tokenizer has as many tokens
CONFIG_BYTES = 16 << 20
BROKEN = (SafetensorError, OSError, ValueError, RuntimeError)


@dataclass(frozen=True)
class Stored:
    """One tensor's header. `dtype` as safetensors names it: F32, BF16, I64, BOOL."""

    shape: tuple[int, ...]
    dtype: str
    file: str = "model.safetensors"


@dataclass(frozen=True)
class Facts:
    config: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Stored] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    d2t: list[int] | None = None
    t2d_ids: list[int] | None = None  # target ids that the mask marks
    files: tuple[str, ...] = ()
    not_finite: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()
    target: Source | None = None


def rope_of(config: dict[str, Any]) -> dict[str, Any]:
    """{"rope_theta", "rope_type", ...} of either form: `rope_parameters`, or `rope_theta` and `rope_scaling`.

    Gemma 3 keeps a set for each kind of layer: drafters take the one of full attention.
    """
    given = config.get("rope_parameters")
    given = given if isinstance(given, dict) else {}
    given = given.get("full_attention", given)
    scaling = config.get("rope_scaling")
    rope = {**(scaling if isinstance(scaling, dict) else {}), **(given if isinstance(given, dict) else {})}
    kind = rope.pop("type", None)
    rope.setdefault("rope_type", kind or "default")
    rope.setdefault("rope_theta", config.get("rope_theta") or 10000.0)
    return rope


def read_facts(folder: Path) -> Facts:
    """All but the weights. Never raises for what the folder holds."""
    try:
        with os.scandir(folder) as entries:
            files = sorted(entry.name for entry in entries)
    except OSError as error:
        return Facts(unreadable=(f"{folder} cannot be opened: {error.strerror}",))
    broken: list[str] = []
    config = _json(folder / "config.json", broken) if "config.json" in files else {}
    papers = _json(folder / "provenance.json", broken) if "provenance.json" in files else {}
    tensors: dict[str, Stored] = {}
    maps: dict[str, torch.Tensor] = {}
    for name in [f for f in files if f.endswith(".safetensors")]:
        _headers(folder / name, tensors, maps, broken)
    _missing_shards(folder, files, broken)
    offsets, mask = maps.get("d2t"), maps.get("t2d")
    return Facts(
        config=config,
        tensors=tensors,
        provenance=papers,
        d2t=None if offsets is None else [int(i) for i in offsets.flatten().tolist()],
        t2d_ids=None if mask is None else mask.flatten().bool().nonzero().flatten().tolist(),
        files=tuple(files),
        unreadable=tuple(broken),
    )


def _json(path: Path, broken: list[str]) -> dict[str, Any]:
    if not path.is_file():  # a pipe would be waited for
        broken.append(f"{path.name} is no file")
        return {}
    try:
        if path.stat().st_size > CONFIG_BYTES:
            broken.append(f"{path.name} has {path.stat().st_size >> 20} MiB: no {path.name} is that large")
            return {}
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        broken.append(f"{path.name} cannot be read: {error.strerror}")
    except (ValueError, RecursionError) as error:
        broken.append(f"{path.name} is not JSON: {str(error)[:120]}")
    else:
        if isinstance(value, dict):
            return value
        broken.append(f"{path.name} holds no JSON object")
    return {}


def _headers(path: Path, tensors: dict[str, Stored], maps: dict[str, torch.Tensor], broken: list[str]) -> None:
    if not path.is_file():
        broken.append(f"{path.name} is no file")
        return
    try:
        with safe_open(path, "pt") as file:
            for name in list(file.keys()):
                part = file.get_slice(name)
                stored = Stored(tuple(part.get_shape()), str(part.get_dtype()), path.name)
                tensors[name] = stored
                base = name.removeprefix("model.")
                whole = stored.dtype[0] in "IU" if base == "d2t" else base == "t2d"
                if whole and torch.Size(stored.shape).numel() <= MAP_ENTRIES:
                    maps[base] = file.get_tensor(name)
    except BROKEN as error:
        broken.append(f"{path.name} cannot be read as safetensors ({str(error)[:120]}): truncated or damaged")


def _missing_shards(folder: Path, files: list[str], broken: list[str]) -> None:
    for name in [f for f in files if f.endswith(".safetensors.index.json")]:
        index = _json(folder / name, broken)
        shards = index.get("weight_map")
        if index and not isinstance(shards, dict):
            broken.append(f"{name} has no weight_map that names files")
        wanted = {str(shard) for shard in shards.values()} if isinstance(shards, dict) else set()
        broken += [f"{name} names {shard}, which is not there" for shard in sorted(wanted - set(files))]


def with_weights(folder: Path, facts: Facts) -> Facts:
    """The same, with the names of tensors that hold NaN or infinity; they are read one at a time."""
    found: list[str] = []
    try:
        for file in sorted({stored.file for stored in facts.tensors.values()}):
            with safe_open(folder / file, "pt") as opened:
                for name in list(opened.keys()):
                    tensor = opened.get_tensor(name)
                    if tensor.is_floating_point() and not bool(torch.isfinite(tensor.float()).all()):
                        found.append(name)
    except BROKEN as error:
        return replace(facts, unreadable=(f"the weights cannot be read: {str(error)[:120]}",))
    return replace(facts, not_finite=tuple(found))
