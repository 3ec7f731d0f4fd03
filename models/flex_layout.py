"""FlexDraft on disk, in a layout of its own (no engine reads one): model.safetensors, config.json, provenance.json.

Tensors, for each tuned layer i (the target's own number): `layers.{i}.self_attn.{q,k,v,o}_proj.weight`, `.bias` where
the target has one, `layers.{i}.self_attn.{q,k}_norm.weight` where it has these (gains as they multiply, in every
family); and `mask` [hidden_size]. Copies of whole layers have `layers.{i}.mlp.{gate_up,down}.weight` (gate over up) and
`layers.{i}.{input_layernorm,...}.weight` besides. With adapters the projections are the target's, and PEFT's two files
say what is added to them (models/flex_lora.py). A calibrator is a file of its own, calibrator.safetensors:
`inner.{weight,bias}`, `outer.{weight,bias}`; its metadata say of which target it is and, by their hash, of which masks.
config.json holds `flexdraft_config`: the fields of models.flexdraft.FlexDraftConfig.
"""

import sys
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from models import flex_published
from models.flex_lora import adapter_names, check_adapter, save_adapter
from models.flexdraft import FlexDraft, FlexDraftConfig
from models.imports import refuse_not_finite
from models.source import Source
from models.target import Target
from models.weights import ADAPTER, CALIBRATOR, WHOLE, apart, read_headers, read_tensors, weights_hash
from recipes.files import read_json, whole_folder, write_json
from recipes.schema import BLOCK_SIZES, UserError

KEY, PAPERS = "flexdraft_config", "provenance.json"
PREFIX = "calibrator."
LARGEST = 2**20 + 1  # no size of a model reaches it
NUMBERS = {"target_layers": range(1, 1001), "split_layer": range(1000), "block_size": BLOCK_SIZES}  # else from 1
NUMBERS |= dict.fromkeys(("calibrator_rank", "lora_rank", "inner_size"), range(LARGEST))
UNCALIBRATED = (
    f"Copy the right one; or go on without, with calibrator_rank 0 in config.json and no {CALIBRATOR}, and fit one "
    "(train/calibrator.py)."
)
SWITCHES = ("qkv_bias", "out_bias", "qk_norm", "four_norms")


def names(drafter: FlexDraft) -> dict[str, str]:
    """Parameter -> name on disk, of all but the calibrator, and with adapters but the projections."""
    out = {}
    for name in drafter.state_dict():
        head, _, rest = name.partition(".")
        if name.startswith(PREFIX) or (drafter.config.lora_rank and "_proj." in name):
            continue
        if head == "layers":
            number, _, rest = rest.partition(".")
            place = f"layers.{int(number) + drafter.config.split_layer}"
            if rest.startswith("block.norms."):
                out[name] = f"{place}.{rest.removeprefix('block.norms.')}.weight"
            elif rest.startswith("block."):
                out[name] = f"{place}.mlp.{rest.removeprefix('block.')}"
            else:
                rest = f"{rest}.weight" if rest in ("q_norm", "k_norm") else rest
                out[name] = f"{place}.self_attn.{rest}"
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
        if drafter.config.lora_rank:
            base = str(provenance.get("target", {}).get("path", ""))
            save_adapter(drafter.layers, drafter.config.split_layer, drafter.config.lora_rank, base, aside, dtype)
        if calibrator:
            belongs = {"target": provenance["fingerprint"], "masks": masks_hash(aside)}
            save_file(calibrator, aside / CALIBRATOR, metadata={"format": "pt", **belongs})
        write_json(aside / "config.json", config)
        write_json(aside / PAPERS, provenance)


def masks_hash(folder: Path) -> str:
    """Of what the masks are made of, the calibrator left out."""
    return weights_hash(folder, (ADAPTER,))


def is_flexdraft(folder: Path) -> bool:
    """Of our layout, or of its authors' checkpoints (models/flex_published.py)."""
    path = folder / "config.json"
    return path.is_file() and (KEY in read_json(path, f"drafter={folder}") or flex_published.is_published(folder))


def check_flexdraft(folder: Path, target: Source | Target | None, quiet: bool = False) -> FlexDraftConfig:
    """Refuse, before weights load, what is damaged, incomplete, or for another target; warnings unless `quiet`."""
    published, config = flex_published.is_published(folder), read_config(folder)
    if not published:
        _refuse_other_papers(folder, config, target)
    if target is not None:
        flex_published.refuse_other_sizes(folder, config, target)
    with torch.device("meta"):
        empty = FlexDraft(config)
    shapes, found = empty.state_dict(), read_headers(folder)
    places = flex_published.names(empty) if published else names(empty)
    for ours, theirs in places.items():
        if theirs not in found:
            raise UserError(f"drafter={folder}: {theirs} is missing. Export it again.")
        if found[theirs][0] != tuple(shapes[ours].shape):
            raise UserError(
                f"drafter={folder}: {theirs} has shape {list(found[theirs][0])}, not {list(shapes[ours].shape)}"
            )
    if published:
        flex_published.refuse_unknown(folder, set(places.values()), set(found))
        if not quiet:
            print(f"warning: {folder} carries no target fingerprint; it may belong to another target", file=sys.stderr)
        return config
    if odd := apart(found, places.values()):
        raise UserError(f"drafter={folder}: {WHOLE} {odd}, by config.json's {KEY}. Export it again.")
    if config.lora_rank:
        named = {theirs: f"layers.{ours}" for ours, theirs in adapter_names(empty.layers, config.split_layer).items()}
        check_adapter(folder, config.lora_rank, range(config.split_layer, config.target_layers))
        _check_part(folder, ADAPTER, {theirs: tuple(shapes[ours].shape) for theirs, ours in named.items()})
    if config.calibrator_rank:
        _check_calibrator(folder, {n: tuple(t.shape) for n, t in shapes.items() if n.startswith(PREFIX)})
    return config


def read_config(folder: Path) -> FlexDraftConfig:
    """Of a folder in either layout; UserError where it is none of a FlexDraft that can be."""
    config = flex_published.read_config(folder) if flex_published.is_published(folder) else _own_config(folder)
    _refuse_odd_values(folder, config)
    if config.split_layer >= config.target_layers:
        raise UserError(
            f"drafter={folder}: split_layer {config.split_layer} is out of range for a target of "
            f"{config.target_layers} layers"
        )
    return config


def _own_config(folder: Path) -> FlexDraftConfig:
    raw = read_json(folder / "config.json", f"drafter={folder}")[KEY]
    if not isinstance(raw, dict):
        raise UserError(f"drafter={folder}: config.json's {KEY} is no table of settings. Export it again.")
    optional = {field.name for field in fields(FlexDraftConfig) if field.default is not MISSING}
    if odd := apart(raw, {field.name for field in fields(FlexDraftConfig)} - (optional - set(raw))):
        raise UserError(f"drafter={folder}: config.json's {KEY} {odd}. Export it again.")
    return FlexDraftConfig(**raw)


def _refuse_odd_values(folder: Path, config: FlexDraftConfig) -> None:
    """Of other types, or beyond what any model has: what is built from the numbers would fail without naming them."""
    for key, value in asdict(config).items():
        allowed = NUMBERS.get(key, range(1, LARGEST))
        if key == "rms_norm_eps":
            fits, rule = isinstance(value, float) and 0 < value < 1, "a number above 0 and below 1"
        elif key in SWITCHES:
            fits, rule = isinstance(value, bool), "true or false"
        else:
            fits = type(value) is int and value in allowed
            rule = f"a whole number from {allowed.start} to {allowed.stop - 1}"
        if not fits:
            raise UserError(f"drafter={folder}: config.json's {key} is {value!r}: must be {rule}. Export it again.")


def _refuse_other_papers(folder: Path, config: FlexDraftConfig, target: Source | Target | None) -> None:
    """A folder that does not say of which target it is, or says another; and parts that its config does not count."""
    if not (folder / PAPERS).is_file():
        raise UserError(f"drafter={folder}: {PAPERS}, which says of which target it is, is missing. Copy it too.")
    stated = read_json(folder / PAPERS, f"drafter={folder}").get("fingerprint")
    if not isinstance(stated, str):
        raise UserError(f"drafter={folder}: {PAPERS} names no fingerprint of a target. Copy it again.")
    if target is not None and stated != target.fingerprint:
        raise UserError(
            f"drafter={folder} was trained for another target (fingerprint {stated}, this one's is "
            f"{target.fingerprint}). Use the recipe it was trained with, or train one for this target."
        )
    for name, key in ((CALIBRATOR, "calibrator_rank"), (ADAPTER, "lora_rank")):
        if getattr(config, key) == 0 and (folder / name).is_file():
            raise UserError(
                f"drafter={folder}: {name} is there, but config.json's {key} is 0, so that it would not be used. "
                f"Set {key} to its rank, or take the file away."
            )


def _check_calibrator(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Refuse a calibrator that is not of these masks, or of another target."""
    if not (folder / CALIBRATOR).is_file():
        raise UserError(f"drafter={folder}: {CALIBRATOR} is missing. {UNCALIBRATED}")
    said = _check_part(folder, CALIBRATOR, {name.removeprefix(PREFIX): shape for name, shape in shapes.items()})
    if said.get("target") != read_json(folder / PAPERS, f"drafter={folder}").get("fingerprint"):
        raise UserError(f"drafter={folder}: {CALIBRATOR} was fitted for another target. {UNCALIBRATED}")
    if said.get("masks") != masks_hash(folder):
        raise UserError(f"drafter={folder}: {CALIBRATOR} was fitted for another drafter. {UNCALIBRATED}")


def _check_part(folder: Path, name: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, str]:
    """The metadata of a file that must hold these tensors."""
    try:
        with safe_open(folder / name, "pt") as file:
            found = {key: tuple(file.get_slice(key).get_shape()) for key in list(file.keys())}
            said = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise UserError(f"drafter={folder}: {name} cannot be read: {error}. Write it again.") from error
    if odd := apart(found, shapes):
        raise UserError(f"drafter={folder}: {name} does not fit: it {odd}")
    if odd := next((key for key in shapes if found[key] != shapes[key]), ""):
        have, want = list(found[odd]), list(shapes[odd])
        raise UserError(f"drafter={folder}: {name} does not fit: {odd} has shape {have}, not {want}")
    return dict(said)


def load_flexdraft(folder: Path, target: Target, adapters: bool = False) -> FlexDraft:
    """On the target's device, in fp32; adapters are merged but for `adapters`. Raises UserError naming what does not
    fit; warnings are `check_flexdraft`'s."""
    drafter = FlexDraft(check_flexdraft(folder, target, quiet=True))
    raw, published = read_tensors(folder), flex_published.is_published(folder)
    places = flex_published.names(drafter) if published else names(drafter)
    tensors = {ours: raw[theirs].float() for ours, theirs in places.items()}
    if drafter.config.lora_rank:
        drafter.copy_from(target)
        added = load_file(folder / ADAPTER)
        named = adapter_names(drafter.layers, drafter.config.split_layer)
        tensors |= {f"layers.{ours}": added[theirs].float() for ours, theirs in named.items()}
    if drafter.calibrator is not None and not published:
        tensors |= {f"{PREFIX}{name}": t.float() for name, t in load_file(folder / CALIBRATOR).items()}
    refuse_not_finite(tensors, folder)
    drafter.load_state_dict(drafter.state_dict() | tensors)  # the file's are complete but for what adapters sit on
    drafter = drafter.to(target.device).eval()
    return drafter if adapters else drafter.merged()
