"""The drafter on disk: the portable layout that vLLM and SGLang both read (vLLM 0.33, SGLang 0.5.23).

One Llama-style layer, names without a prefix, no embedding (engines share the target's), the head always written,
offsets and mask of the vocabulary only when it is reduced, layer ids only when they are not the default ones.
"""

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.eagle3 import Eagle3, Eagle3Config
from models.source import Source
from models.target import Target, check_taps
from models.vocab import VocabMap
from recipes.files import read_json, whole_folder, write_json
from recipes.schema import UserError

MAP = ("d2t", "t2d")
OFF = (
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "attention_bias",
)  # flags not trained here yet


def engine_layer_ids(taps: tuple[int, ...], target_layers: int) -> dict[str, Any]:
    """The config keys that tell engines which states to capture; none for the default taps.

    vLLM reads the top-level list in h[L] numbering; SGLang reads the nested one and adds 1.
    """
    if taps == (2, target_layers // 2, target_layers - 3):
        return {}
    if 0 in taps:
        raise UserError("taps include the embedding output h[0], which SGLang cannot capture; choose taps from 1 on")
    nested = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [t - 1 for t in taps]}
    return {"eagle_aux_hidden_state_layer_ids": list(taps), "eagle_config": nested}


def engine_config(config: Eagle3Config) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "num_aux_hidden_states": len(config.taps),
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": config.rope_parameters,
        "rope_theta": config.rope_parameters.get("rope_theta", 10000.0),
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        **dict.fromkeys(OFF, False),
        **engine_layer_ids(config.taps, config.target_layers),
    }


def save_drafter(drafter: Eagle3, folder: Path, provenance: dict[str, Any], dtype: torch.dtype = torch.float32) -> None:
    """Write config.json, model.safetensors and provenance.json, all or nothing.

    `provenance` must carry `fingerprint` (of the target); `target_layers` is added.
    """
    if not provenance.get("fingerprint"):
        raise ValueError("a drafter without its target's fingerprint can't be told from one for another target")
    tensors = {name: t.detach().to("cpu", dtype).contiguous() for name, t in drafter.state_dict().items()}
    if not drafter.vocab.full:
        tensors |= {"d2t": drafter.vocab.d2t.cpu(), "t2d": drafter.vocab.t2d.cpu()}
    config = engine_config(drafter.config) | {"torch_dtype": str(dtype).removeprefix("torch.")}
    with whole_folder(folder) as aside:
        save_file(tensors, aside / "model.safetensors", metadata={"format": "pt"})
        write_json(aside / "config.json", config)
        write_json(aside / "provenance.json", {**provenance, "target_layers": drafter.config.target_layers})


def read_provenance(folder: Path) -> dict[str, Any]:
    path = folder / "provenance.json"
    return read_json(path, "drafter") if path.is_file() else {}


def check_drafter(folder: Path, target: Source | Target | None) -> tuple[Eagle3Config, VocabMap] | None:
    """Refuse, before weights load, a folder that is no drafter, one for another target, or one that does not fit it.

    `target` None: it is not at hand, so that the folder is judged by itself alone, and None is returned.
    """
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            inner = folder / "drafter"
            words = f"Did you mean drafter={inner}?" if inner.is_dir() else "Give the drafter/ folder of a finished run"
            raise UserError(f"drafter={folder}: no {name} there, so it is not an exported drafter. {words}")
    raw = read_json(folder / "config.json", f"drafter={folder}")
    try:
        with safe_open(folder / "model.safetensors", "pt") as file:
            names = file.keys()
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
            d2t, t2d = (file.get_tensor(name) if name in shapes else None for name in MAP)
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"drafter={folder}: model.safetensors cannot be read: {error}. Export or copy it again."
        ) from error
    stated = read_provenance(folder).get("fingerprint")
    if stated is None:
        print(f"warning: {folder} carries no target fingerprint; it may belong to another target", file=sys.stderr)
    elif target is not None and stated != target.fingerprint:
        ours = f"this one's is {target.fingerprint}"
        raise UserError(
            f"drafter={folder} was trained for another target (fingerprint {stated}, {ours}). "
            "Use the recipe it was trained with, or train one for this target."
        )
    if target is None:
        return None
    config = _read_config(raw, folder, target)
    if (d2t is None) != (config.draft_vocab_size == config.vocab_size):
        raise UserError(f"drafter={folder}: d2t must be there exactly when draft_vocab_size is below vocab_size")
    vocab = _read_vocab(d2t, t2d, config, folder)
    _check_shapes(config, vocab, shapes, folder)
    return config, vocab


def load_drafter(folder: Path, target: Target) -> Eagle3:
    """Read a drafter for this target, on its device, in fp32. Raises UserError naming what does not fit."""
    checked = check_drafter(folder, target)
    assert checked is not None, "the target is given"
    drafter = Eagle3(*checked)
    tensors = {name: t for name, t in load_file(folder / "model.safetensors").items() if name not in MAP}
    bad = [n for n, t in tensors.items() if not torch.isfinite(t.float()).all()]
    if bad:
        raise UserError(f"drafter={folder}: not finite: {bad}")
    drafter.load_state_dict(tensors)
    return drafter.to(target.device).eval()


def _read_config(raw: dict[str, Any], folder: Path, target: Source | Target) -> Eagle3Config:
    for name, kind in ((f.name, f.type) for f in fields(Eagle3Config)):
        if kind in (int, "int") and not isinstance(raw.get(name, 0), int):
            raise UserError(
                f"drafter={folder}: config.json says {name}={raw[name]!r}, which must be a whole number. "
                "Put it right, or export the drafter again"
            )
    on = [flag for flag in OFF if raw.get(flag)]
    if on:
        raise UserError(f"drafter={folder}: {', '.join(on)} set, which this version cannot decode")
    if raw.get("num_hidden_layers") != 1:
        raise UserError(
            f"drafter={folder}: {raw.get('num_hidden_layers')} layers; only one-layer drafters are portable"
        )
    taps = raw.get("eagle_aux_hidden_state_layer_ids")
    given = {name: raw[name] for name in Eagle3Config.__dataclass_fields__ if name in raw}
    try:
        config = Eagle3Config(**given, taps=check_taps(taps, target.n_layers), target_layers=target.n_layers)
    except TypeError as error:
        raise UserError(f"drafter={folder}/config.json is incomplete: {error}") from error
    if (config.hidden_size, config.vocab_size) != (target.hidden_size, target.vocab_size):
        raise UserError(
            f"drafter={folder} is for hidden size {config.hidden_size} and vocabulary {config.vocab_size}, "
            f"the target has {target.hidden_size} and {target.vocab_size}. Give the drafter that was trained for it"
        )
    return config


def _read_vocab(d2t: Tensor | None, t2d: Tensor | None, config: Eagle3Config, folder: Path) -> VocabMap:
    if d2t is None:
        return VocabMap.identity(config.vocab_size)
    ids = d2t + torch.arange(len(d2t))
    sound = (
        len(ids) == config.draft_vocab_size and bool((ids[1:] > ids[:-1]).all()) and int(ids[-1]) < config.vocab_size
    )
    if not sound or int(ids[0]) < 0:
        raise UserError(f"drafter={folder}: d2t is not an ascending offset map (absolute ids written by mistake?)")
    vocab = VocabMap.from_ids(ids, config.vocab_size)
    if t2d is not None and not torch.equal(t2d.bool(), vocab.t2d):
        raise UserError(f"drafter={folder}: t2d and d2t disagree")
    return vocab


def _check_shapes(config: Eagle3Config, vocab: VocabMap, shapes: dict[str, tuple[int, ...]], folder: Path) -> None:
    with torch.device("meta"):
        wanted = {name: tuple(tensor.shape) for name, tensor in Eagle3(config, vocab).state_dict().items()}
    found = {name: shape for name, shape in shapes.items() if name not in MAP}
    missing, unknown = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    wrong = sorted(name for name in wanted.keys() & found.keys() if wanted[name] != found[name])
    if missing or unknown or wrong:
        raise UserError(
            f"drafter={folder}: tensors missing {missing}, unknown {unknown}, of wrong shape {wrong}, "
            "by its own config.json. Export or copy it again"
        )
