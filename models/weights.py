"""The weights in a drafter's folder: one safetensors file, several with an index, or an old pickled `.bin`.

A `.bin` is read by torch's weights-only unpickler, which runs no code of the file.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from recipes.files import read_json, sha256_file, sha256_json
from recipes.schema import UserError

WHOLE, INDEX, PICKLED = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
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
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX, f"drafter={folder}").get("weight_map")
        names = list(index.values()) if isinstance(index, dict) else []
        if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise UserError(f"drafter={folder}: {INDEX} names no files of this folder")
        return [folder / name for name in sorted(set(names))]
    if (folder / PICKLED).is_file():
        return [folder / PICKLED]
    raise not_exported(folder, f"no {WHOLE} (nor {INDEX} or {PICKLED})")


def not_exported(folder: Path, lacking: str) -> UserError:
    inner = folder / "drafter"
    words = f"Did you mean drafter={inner}?" if inner.is_dir() else "Give the drafter/ folder of a finished run"
    return UserError(f"drafter={folder}: {lacking} there, so it is not an exported drafter. {words}")


def weights_hash(folder: Path) -> str:
    """sha256 of the file, or of several files' together."""
    digests = [sha256_file(path) for path in weight_files(folder)]
    return digests[0] if len(digests) == 1 else sha256_json(digests)


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
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # zip, pickle, and torch each raise their own families; files can be damaged in any way
        raise _unreadable(path, error) from error
    if not isinstance(loaded, dict) or not all(isinstance(t, Tensor) for t in loaded.values()):
        raise UserError(f"drafter={path.parent}: {path.name} holds no table of tensors")
    return {str(name): tensor for name, tensor in loaded.items()}


def _unreadable(path: Path, error: Exception) -> UserError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    return UserError(f"drafter={path.parent}: {path.name} cannot be read: {reason}. Export or copy it again.")
