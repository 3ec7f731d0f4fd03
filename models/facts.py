"""What a drafter's folder says of itself: config, tensor headers, papers. Nothing in it is run or unpickled.

Only files of the folder itself are looked at, never those below. Weights are read when they are asked for
(`with_weights`), one tensor at a time; pickled ones by torch's weights-only unpickler, where there are no others. What
cannot be read is kept as a line in `unreadable`.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models.fault import listed
from models.source import Source
from models.weights import DTYPES, target_table, unpickled

PICKLED = (".bin", ".pt")  # that engines read where there are no safetensors
NO_WEIGHTS = ("training_", "optimizer", "scheduler", "scaler", "rng_state")  # how trainers name what else they pickle
NAMES = {dtype: name for name, dtype in DTYPES.items()}
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
class Likeness:
    """A table against the target's."""

    rows: int
    differ: int  # rows that are not the target's, rounding apart
    cosine: float  # mean over the rows


@dataclass(frozen=True)
class Facts:
    config: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Stored] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    d2t: list[int] | None = None
    t2d_ids: list[int] | None = None  # target ids that the mask marks
    files: tuple[str, ...] = ()
    not_finite: tuple[str, ...] = ()
    all_zero: tuple[str, ...] = ()
    embedding: Likeness | None = None  # where the drafter has one of the target's shape
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
    maps: dict[str, Tensor] = {}
    for name in weight_files(files):
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


def weight_files(files: list[str] | tuple[str, ...]) -> list[str]:
    """Those that engines load: pickles only where there is nothing else."""
    safe = [name for name in files if name.endswith(".safetensors")]
    return safe or [name for name in files if name.endswith(PICKLED) and not name.startswith(NO_WEIGHTS)]


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


def _headers(path: Path, tensors: dict[str, Stored], maps: dict[str, Tensor], broken: list[str]) -> None:
    if not path.is_file():
        broken.append(f"{path.name} is no file")
        return
    if path.name.endswith(PICKLED):
        try:
            held = unpickled(path)
        except ValueError as error:
            broken.append(str(error))
            return
        for name, tensor in held.items():
            tensors[name] = Stored(tuple(tensor.shape), NAMES.get(tensor.dtype, str(tensor.dtype)), path.name)
            if _is_map(name, tensors[name]):
                maps[name.removeprefix("model.")] = tensor
        return
    try:
        with safe_open(path, "pt") as file:
            for name in list(file.keys()):
                part = file.get_slice(name)
                tensors[name] = Stored(tuple(part.get_shape()), str(part.get_dtype()), path.name)
                if _is_map(name, tensors[name]):
                    maps[name.removeprefix("model.")] = file.get_tensor(name)
    except BROKEN as error:
        broken.append(f"{path.name} cannot be read as safetensors ({str(error)[:120]}): truncated or damaged")


def _is_map(name: str, stored: Stored) -> bool:
    base = name.removeprefix("model.")
    right = stored.dtype[0] in "IU" if base == "d2t" else base == "t2d"
    return right and torch.Size(stored.shape).numel() <= MAP_ENTRIES


def _missing_shards(folder: Path, files: list[str], broken: list[str]) -> None:
    form = ".safetensors" if any(f.endswith(".safetensors") for f in files) else ".bin"
    for name in [f for f in files if f.endswith((".safetensors.index.json", f"{form}.index.json"))]:
        index = _json(folder / name, broken)
        shards = index.get("weight_map")
        if index and not isinstance(shards, dict):
            broken.append(f"{name} has no weight_map that names files")
        wanted = {str(shard) for shard in shards.values()} if isinstance(shards, dict) else set()
        if gone := sorted(wanted - set(files)):
            verb = "are" if len(gone) > 1 else "is"
            broken.append(f"{name} names {listed(gone, 4)}, which {verb} not there")


def with_weights(folder: Path, facts: Facts) -> Facts:
    """The same, with what the weights alone show; they are read one at a time. Raises UserError where the target's
    own can't be read."""
    broken: list[str] = []
    empty: list[str] = []
    embedding = None
    try:
        for name, tensor in _weights(folder, facts):
            if not tensor.is_floating_point():
                continue
            values = tensor.float()  # fp8 has no such tests of its own
            if not bool(torch.isfinite(values).all()):
                broken.append(name)
            elif not bool(values.any()):
                empty.append(name)
            if name.removeprefix("model.") == "embed_tokens.weight" and facts.target is not None:
                embedding = _against(tensor, target_table(facts.target.folder, "embed_tokens.weight"))
    except BROKEN as error:
        return replace(facts, unreadable=(f"the weights cannot be read: {str(error)[:120]}",))
    return replace(facts, not_finite=tuple(broken), all_zero=tuple(empty), embedding=embedding)


def _weights(folder: Path, facts: Facts) -> Iterator[tuple[str, Tensor]]:
    for name in sorted({stored.file for stored in facts.tensors.values()}):
        if name.endswith(PICKLED):
            yield from unpickled(folder / name).items()
            continue
        with safe_open(folder / name, "pt") as opened:
            for key in list(opened.keys()):
                yield key, opened.get_tensor(key)


def _against(own_VH: Tensor, target_VH: Tensor | None) -> Likeness | None:
    if target_VH is None or own_VH.shape != target_VH.shape:
        return None
    differ, cosine = 0, 0.0
    for own, theirs in zip(own_VH.split(8192), target_VH.split(8192), strict=True):
        a, b = own.float(), theirs.float()
        differ += int((~torch.isclose(a, b, rtol=2**-7, atol=1e-6)).any(1).sum())
        cosine += float(torch.cosine_similarity(a, b).sum())
    return Likeness(len(own_VH), differ, cosine / len(own_VH))
