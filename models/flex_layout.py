"""FlexDraft on disk, in a layout of its own (no engine reads one): model.safetensors, config.json, provenance.json.

Tensors, for each tuned layer i (the target's own number): `layers.{i}.self_attn.{q,k,v,o}_proj.weight`, `.bias` where
the target has one, `layers.{i}.self_attn.{q,k}_norm.weight` where it has these (gains as they multiply, in every
family); and `mask` [hidden_size]. A calibrator is a file of its own, calibrator.safetensors: `inner.{weight,bias}`,
`outer.{weight,bias}`; its metadata say of which target it is and, by their hash, of which masks. config.json holds
`flexdraft_config`: the fields of models.flexdraft.FlexDraftConfig.
"""

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from models.flexdraft import FlexDraft, FlexDraftConfig
from models.imports import refuse_not_finite
from models.source import Source
from models.target import Target
from models.weights import WHOLE, read_headers, read_tensors
from recipes.files import read_json, sha256_file, whole_folder, write_json
from recipes.schema import UserError

KEY = "flexdraft_config"
PREFIX, CALIBRATOR = "calibrator.", "calibrator.safetensors"


def names(drafter: FlexDraft) -> dict[str, str]:
    """Parameter -> name on disk, of all but the calibrator."""
    out = {}
    for name in drafter.state_dict():
        head, _, rest = name.partition(".")
        if name.startswith(PREFIX):
            continue
        if head == "layers":
            number, _, rest = rest.partition(".")
            rest = f"{rest}.weight" if rest in ("q_norm", "k_norm") else rest
            out[name] = f"layers.{int(number) + drafter.config.split_layer}.self_attn.{rest}"
        else:
            out[name] = name
    return out


def save_flexdraft(
    drafter: FlexDraft, folder: Path, provenance: dict[str, Any], dtype: torch.dtype = torch.float32
) -> None:
    """All or nothing. `provenance` must carry `fingerprint` (of the target)."""
    if not provenance.get("fingerprint"):
        raise ValueError("a drafter without its target's fingerprint can't be told from one for another target")
    stored = {name: t.detach().to("cpu", dtype).contiguous() for name, t in drafter.state_dict().items()}
    named = {theirs: stored[ours] for ours, theirs in names(drafter).items()}
    calibrator = {name.removeprefix(PREFIX): t for name, t in stored.items() if name.startswith(PREFIX)}
    config = {
        "architectures": ["FlexDraft"],
        "dtype": str(dtype).removeprefix("torch."),
        KEY: asdict(drafter.config),
    }
    with whole_folder(folder) as aside:
        save_file(named, aside / WHOLE, metadata={"format": "pt"})
        if calibrator:
            belongs = {"target": provenance["fingerprint"], "masks": sha256_file(aside / WHOLE)}
            save_file(calibrator, aside / CALIBRATOR, metadata={"format": "pt", **belongs})
        write_json(aside / "config.json", config)
        write_json(aside / "provenance.json", provenance)


def is_flexdraft(folder: Path) -> bool:
    path = folder / "config.json"
    return path.is_file() and KEY in read_json(path, f"drafter={folder}")


def check_flexdraft(folder: Path, target: Source | Target | None) -> FlexDraftConfig:
    """Refuse, before weights load, what is damaged, incomplete, or for another target."""
    raw = read_json(folder / "config.json", f"drafter={folder}")[KEY]
    known = {field.name for field in fields(FlexDraftConfig)}
    if not isinstance(raw, dict) or set(raw) != known:
        odd = sorted(known ^ set(raw)) if isinstance(raw, dict) else "no table of settings"
        raise UserError(f"drafter={folder}: config.json's {KEY} lacks or has too much: {odd}. Export it again.")
    config = FlexDraftConfig(**raw)
    if not 0 <= config.split_layer < config.target_layers:
        raise UserError(
            f"drafter={folder}: split_layer {config.split_layer} is out of range for a target of "
            f"{config.target_layers} layers"
        )
    if config.block_size < 2:
        raise UserError(f"drafter={folder}: block_size {config.block_size} drafts nothing: it must be 2 or more")
    if target is not None:
        _refuse_other_target(folder, config, target)
    with torch.device("meta"):
        empty = FlexDraft(config)
    shapes, found = empty.state_dict(), read_headers(folder)
    for ours, theirs in names(empty).items():
        if theirs not in found:
            raise UserError(f"drafter={folder}: {theirs} is missing. Export it again.")
        if found[theirs][0] != tuple(shapes[ours].shape):
            raise UserError(
                f"drafter={folder}: {theirs} has shape {list(found[theirs][0])}, not {list(shapes[ours].shape)}"
            )
    if config.calibrator_rank:
        _check_calibrator(folder, {n: tuple(t.shape) for n, t in shapes.items() if n.startswith(PREFIX)})
    return config


def _check_calibrator(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Refuse a calibrator that is not of these masks, or of another target."""
    path = folder / CALIBRATOR
    if not path.is_file():
        raise UserError(f"drafter={folder}: {CALIBRATOR} is missing. Fit it again, or set calibrator_rank to 0.")
    try:
        with safe_open(path, "pt") as file:
            said = file.metadata() or {}
            found = {f"{PREFIX}{name}": tuple(file.get_slice(name).get_shape()) for name in list(file.keys())}
    except (SafetensorError, OSError) as error:
        raise UserError(f"drafter={folder}: {CALIBRATOR} cannot be read: {error}. Fit it again.") from error
    if said.get("target") != read_json(folder / "provenance.json", "drafter").get("fingerprint"):
        raise UserError(f"drafter={folder}: {CALIBRATOR} was fitted for another target. Fit one (train/calibrator.py).")
    if said.get("masks") != sha256_file(folder / WHOLE):
        raise UserError(
            f"drafter={folder}: {CALIBRATOR} was fitted for another drafter. Fit one (train/calibrator.py)."
        )
    if found != shapes:
        raise UserError(f"drafter={folder}: {CALIBRATOR} holds {found}, not {shapes}")


def _refuse_other_target(folder: Path, config: FlexDraftConfig, target: Source | Target) -> None:
    stated = read_json(folder / "provenance.json", "drafter").get("fingerprint")
    if stated != target.fingerprint:
        raise UserError(
            f"drafter={folder} was trained for another target (fingerprint {stated}, this one's is "
            f"{target.fingerprint}). Use the recipe it was trained with, or train one for this target."
        )
    for name, own, theirs in (
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("target_layers", config.target_layers, target.n_layers),
    ):
        if own != theirs:
            raise UserError(f"drafter={folder}: its {name} is {own}, the target's {theirs}")


def load_flexdraft(folder: Path, target: Target) -> FlexDraft:
    """On the target's device, in fp32. Raises UserError naming what does not fit."""
    drafter = FlexDraft(check_flexdraft(folder, target))
    raw = read_tensors(folder)
    tensors = {ours: raw[theirs].float() for ours, theirs in names(drafter).items()}
    if drafter.calibrator is not None:
        tensors |= {f"{PREFIX}{name}": t.float() for name, t in load_file(folder / CALIBRATOR).items()}
    refuse_not_finite(tensors, folder)
    drafter.load_state_dict(tensors)
    return drafter.to(target.device).eval()
