"""The weights in a drafter's folder: safetensors or old pickled `.bin`, in one file or in several with an index.

A `.bin` is read by torch's weights-only unpickler, which runs no code of the file.
"""

import re
import warnings
import zipfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from recipes.files import read_json, sha256_file, sha256_json
from recipes.schema import UserError

WHOLE = "model.safetensors"
FORMS = (WHOLE, "pytorch_model.bin")  # each may be in parts, which an index names
ADAPTER, CALIBRATOR = "adapter_model.safetensors", "calibrator.safetensors"  # PEFT's name, and ours
BESIDE = (ADAPTER, CALIBRATOR)  # of a FlexDraft (models/flex_layout.py)
LARGEST = 4 << 30  # bytes of a pickle of the old form, which is read whole
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
Headers = dict[str, tuple[tuple[int, ...], torch.dtype | str]]


def weight_files(folder: Path) -> list[Path]:
    """Where the weights are: other safetensors files may lie beside them."""
    for whole in FORMS:
        parts = folder / f"{whole}.index.json"
        if (folder / whole).is_file():
            return [folder / whole]
        if parts.is_file():
            index = read_json(parts, f"drafter={folder}").get("weight_map")
            names = list(index.values()) if isinstance(index, dict) else []
            if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
                raise UserError(f"drafter={folder}: {parts.name} names no files of this folder")
            return [folder / name for name in sorted(set(names))]
    raise not_exported(folder, f"no {WHOLE} (nor its index, nor {FORMS[1]})")


def not_exported(folder: Path, lacking: str) -> UserError:
    inner = folder / "drafter"
    words = f"Did you mean drafter={inner}?" if inner.is_dir() else "Give the drafter/ folder of a finished run"
    return UserError(f"drafter={folder}: {lacking} there, so it is not an exported drafter. {words}")


def weights_hash(folder: Path, beside: Sequence[str] = BESIDE) -> str:
    """sha256 of the file, or of several files' together, with those of `beside` that are there."""
    more = [folder / name for name in beside if (folder / name).is_file()]
    digests = [sha256_file(path) for path in [*weight_files(folder), *more]]
    return digests[0] if len(digests) == 1 else sha256_json(digests)


def apart(found: Collection[str], wanted: Collection[str]) -> str:
    """In words what is missing and what is too much, the first few of each; '' where neither is."""
    lacks, odd = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    parts = ("lacks", lacks), ("has no use for", odd)
    told = [f"{verb} {', '.join(names[:4])}{f' and {len(names) - 4} more' * (len(names) > 4)}" for verb, names in parts]
    return " and ".join(words for words, (_, names) in zip(told, parts, strict=True) if names)


def read_headers(folder: Path) -> Headers:
    """Name -> (shape, dtype), without reading the weights of safetensors files."""
    found: Headers = {}
    for path in weight_files(folder):
        if path.suffix == ".bin":
            found |= {name: (tuple(t.shape), t.dtype) for name, t in _unpickled(path).items()}
            continue
        try:
            with safe_open(path, "pt") as file:
                for name in list(file.keys()):
                    part = file.get_slice(name)
                    found[name] = (tuple(part.get_shape()), DTYPES.get(part.get_dtype(), part.get_dtype()))
        except (SafetensorError, OSError) as error:
            raise _unreadable(path, error) from error
    return found


def read_tensors(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in weight_files(folder):
        try:
            found |= _unpickled(path) if path.suffix == ".bin" else load_file(path)
        except (SafetensorError, OSError) as error:
            raise _unreadable(path, error) from error
    return found


def target_table(folder: Path, ending: str) -> Tensor | None:
    """The tensor of a target's safetensors files whose name ends so (`embed_tokens.weight`, `lm_head.weight`)."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                for name in list(file.keys()):
                    if name == ending or name.endswith(f".{ending}"):
                        table: Tensor = file.get_tensor(name)
                        return table
        except (SafetensorError, OSError) as error:
            raise UserError(f"target: {path} cannot be read: {error}") from error
    return None


def _unpickled(path: Path) -> dict[str, Tensor]:
    try:
        return unpickled(path)
    except ValueError as error:
        raise UserError(f"drafter={path.parent}: {error}. Export or copy it again.") from error


def unpickled(path: Path) -> dict[str, Tensor]:
    """A pickled table of plain tensors; those of a zip (torch 1.6 and later) are mapped and read when used. Raises
    ValueError, in a line that names the file, for anything else."""
    if not path.is_file():  # a pipe would be waited for
        raise ValueError(f"{path.name} is no file")
    try:
        zipped = zipfile.is_zipfile(path)
        if not zipped and path.stat().st_size > LARGEST:
            raise ValueError(f"{path.name} is an old pickle of {path.stat().st_size >> 30} GiB: no drafter is")
        with warnings.catch_warnings(action="ignore"):  # of the pickle's protocol
            loaded: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:  # zip, pickle, and torch each raise their own families; files can be damaged in any way
        raise ValueError(_why_not_read(path, error)) from error
    if not isinstance(loaded, dict) or not all(isinstance(t, Tensor) for t in loaded.values()):
        raise ValueError(f"{path.name} holds no table of tensors")
    odd = [str(name) for name, t in loaded.items() if not _plain(t)]
    if odd:
        raise ValueError(f"{path.name} holds tensors that are not stored in full: {', '.join(odd[:4])}")
    return {str(name): tensor for name, tensor in loaded.items()}


def _plain(tensor: Tensor) -> bool:
    """As many bytes as entries: no view that claims more than the file has, nothing sparse or quantised."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        return False
    return bool(tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes())


def _why_not_read(path: Path, error: Exception) -> str:
    foreign = re.search(r"GLOBAL (\S+)", str(error))  # torch names what the pickle asks for
    if foreign:
        return f"{path.name} is a pickle that asks for {foreign[1]}, and not of tensors alone: it was not run"
    if "Weights only load failed" in str(error):  # whose first line advises to run it
        return f"{path.name} cannot be read: it is damaged, or a pickle of more than tensors, which was not run"
    return f"{path.name} cannot be read: {_first_line(error)}"


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(
        f"drafter={path.parent}: {path.name} cannot be read: {_first_line(error)}. Export or copy it again."
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
