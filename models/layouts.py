"""The drafter on disk: written in the layout of an engine, read from any of them.

Names, shapes, settings and what a layout can't express are in models/layout_tables.py; what is asked of a folder that
others wrote in models/imports.py. Layouts are those of vLLM 0.33, SGLang 0.5.23 and speculators 0.9.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from models.eagle3 import Eagle3, Eagle3Config
from models.imports import Stored, read_stored, refuse_not_finite
from models.layout_tables import PORTABLE, SPECULATORS, VLLM, engine_config, names, why_not
from models.source import Source, download, on_the_hub
from models.target import Target
from models.vocab import VocabMap
from models.weights import not_exported, read_tensors, weight_files
from recipes.files import read_json, user_path, whole_folder, write_json
from recipes.schema import UserError

SPECFORGE_NORM = (
    "norm_output is read as engines do (the next step gets the normed state). SpecForge means something else by it: "
    "for a drafter trained there set it to false in config.json"
)


@dataclass(frozen=True)
class Verifier:
    """What speculators' layout holds of the target: how to find it, and its embedding."""

    name_or_path: str
    architectures: list[str]
    embedding_VH: Tensor


def default_layout(config: Eagle3Config) -> tuple[str, str]:
    """The portable layout where it can express the drafter, else vLLM's; and in a line why, if not portable."""
    reasons = why_not(config, PORTABLE)
    if not reasons:
        return PORTABLE, ""
    return VLLM, f"the drafter is written for vLLM alone: {'; '.join(reasons)}"


def save_drafter(
    drafter: Eagle3,
    folder: Path,
    provenance: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    layout: str | None = None,
    verifier: Verifier | None = None,
) -> None:
    """Write config.json, model.safetensors and provenance.json, all or nothing, in the default layout or the given one.

    `provenance` must carry `fingerprint` (of the target); `target_layers` is added. Speculators' layout needs the
    `verifier`. Raises UserError with the reasons where the layout can't express the drafter.
    """
    if not provenance.get("fingerprint"):
        raise ValueError("a drafter without its target's fingerprint can't be told from one for another target")
    layout = layout or default_layout(drafter.config)[0]
    reasons = why_not(drafter.config, layout)
    if reasons:
        raise UserError(f"layout={layout} cannot express this drafter: {'; '.join(reasons)}")
    tensors = {name: t.detach() for name, t in drafter.state_dict().items()}
    if layout == SPECULATORS:
        if verifier is None:
            raise ValueError("speculators' layout holds the target's embedding and name: give the verifier")
        tensors["embed_tokens.weight"] = verifier.embedding_VH.detach()
    stored = {name: t.to("cpu", dtype).contiguous() for name, t in tensors.items()}
    stored |= {"d2t": drafter.vocab.d2t.cpu(), "t2d": drafter.vocab.t2d.cpu()}
    named = {theirs: stored[ours] for ours, theirs in names(drafter.config, layout).items()}
    target = {"name_or_path": verifier.name_or_path, "architectures": verifier.architectures} if verifier else {}
    config = engine_config(drafter.config, layout, str(dtype).removeprefix("torch."), target)
    with whole_folder(folder) as aside:
        save_file(named, aside / "model.safetensors", metadata={"format": "pt"})
        write_json(aside / "config.json", config)
        write_json(aside / "provenance.json", {**provenance, "target_layers": drafter.config.target_layers})


def find_drafter(name: str, what: str = "drafter") -> Path:
    """The folder, or the hub's snapshot where there is no such folder; pickled weights only if it has no others."""
    if not on_the_hub(name):
        folder = user_path(name)
        if not folder.is_dir():
            raise UserError(f"{what}={name}: no such folder, nor a hub id (OWNER/NAME)")
        return folder
    found = download(name, ["*.json", "*.safetensors"], f"{what}={name} (no such folder here)")
    if not any(found.glob("*.safetensors")):
        found = download(name, ["*.json", "pytorch_model*.bin"], f"{what}={name}")
    return found


def read_provenance(folder: Path) -> dict[str, Any]:
    """Empty where there are none. Raises UserError for papers that nobody could have written here."""
    path = folder / "provenance.json"
    papers = read_json(path, "drafter") if path.is_file() else {}
    odd = [k for k in ("target", "data", "vocabulary", "versions", "recipe") if not isinstance(papers.get(k, {}), dict)]
    if odd:
        raise UserError(f"drafter={folder}: provenance.json is damaged: {odd[0]} is no mapping. Copy it again")
    return papers


def check_drafter(folder: Path, target: Source | Target | None, start: bool = False, quiet: bool = False) -> Stored:
    """Refuse, before weights load, a folder that is no drafter, one for another target, or one that does not fit it.

    `target` None: it is not at hand, so that the folder is judged by itself alone. As a `start` of training the drafter
    may come from another target of the same sizes.
    """
    if not (folder / "config.json").is_file():
        raise not_exported(folder, "no config.json")
    weight_files(folder)
    stated = read_provenance(folder).get("fingerprint")
    fingerprint = None if target is None else target.fingerprint
    if not start and fingerprint is not None and stated not in (None, fingerprint):
        raise UserError(
            f"drafter={folder} was trained for another target (fingerprint {stated}, this one's is {fingerprint}). "
            "Use the recipe it was trained with, or train one for this target."
        )
    stored = read_stored(folder, None if target is None else (target.hidden_size, target.vocab_size))
    if target is not None:
        stored.config(target.n_layers)
    if stated is None and not quiet:
        _warn(f"{folder} carries no target fingerprint; it may belong to another target")
        if stored.fields["norm_output"]:
            _warn(f"{folder}: {SPECFORGE_NORM}")
    return stored


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


def load_drafter(folder: Path, target: Target, start: bool = False) -> Eagle3:
    """Read a drafter of any layout for this target, on its device, in fp32. As a `start` of training it may come from
    another target of the same sizes. Raises UserError naming what does not fit."""
    stored = check_drafter(folder, target, start)
    taps = stored.config(target.n_layers).taps
    if taps != target.taps:
        raise UserError(
            f"drafter={folder} reads the target's states {list(taps)}, the target gives {list(target.taps)}: "
            f"give target.taps=[{','.join(map(str, taps))}]"
        )
    if stored.window is not None and stored.window < target.max_positions:
        _warn(f"{folder} was trained with a window of {stored.window} tokens; here it sees all")
    limit = stored.fields["max_position_embeddings"]
    if limit < target.max_positions:
        _warn(f"{folder} knows {limit} positions, the target {target.max_positions}: past the first it drafts blindly")
    drafter = read_drafter(stored, target.n_layers, None if start else target.embed_weight, target.head_weight)
    return drafter.to(target.device).eval()


def read_drafter(
    stored: Stored, target_layers: int, embedding_VH: Tensor | None = None, head_VH: Tensor | None = None
) -> Eagle3:
    """The drafter, on the CPU in fp32. An embedding of its own must be the target's where that is given, and is not
    kept; a head that it lacks is the target's."""
    folder = stored.folder
    raw = read_tensors(folder)
    tensors = {ours: raw[theirs] for ours, theirs in stored.names.items()}
    refuse_not_finite(tensors, folder)
    own = tensors.pop("embed_tokens.weight", None)
    if own is not None and embedding_VH is not None:
        _check_embedding(own, embedding_VH, folder)
    if stored.borrows_head:
        if head_VH is None:
            raise UserError(f"drafter={folder}: it has no lm_head.weight of its own: give its target=")
        tensors["lm_head.weight"] = head_VH.detach().to("cpu", torch.float32)
    config = stored.config(target_layers)
    vocab = _read_vocab(tensors.pop("d2t", None), tensors.pop("t2d", None), config, folder)
    drafter = Eagle3(config, vocab)
    drafter.load_state_dict(tensors)
    return drafter


def _check_embedding(own_VH: Tensor, target_VH: Tensor, folder: Path) -> None:
    """Only a frozen copy of the target's table, rounded or not, goes with the target's own."""
    theirs = target_VH.detach().to("cpu", torch.float32)
    if own_VH.shape != theirs.shape or not torch.allclose(own_VH.float(), theirs, rtol=2**-7, atol=1e-6):
        raise UserError(
            f"drafter={folder}: its embed_tokens.weight is not the target's, and this version decodes with the target's"
        )


def _read_vocab(d2t: Tensor | None, t2d: Tensor | None, config: Eagle3Config, folder: Path) -> VocabMap:
    if d2t is None:
        return VocabMap.identity(config.vocab_size)
    d2t = d2t.long()
    ids = d2t + torch.arange(len(d2t))
    ascending = bool((ids[1:] > ids[:-1]).all())
    if not ascending or int(ids[0]) < 0 or int(ids[-1]) >= config.vocab_size:
        raise UserError(f"drafter={folder}: d2t is not an ascending offset map (absolute ids written by mistake?)")
    vocab = VocabMap.from_ids(ids, config.vocab_size)
    if t2d is not None and not torch.equal(t2d.bool(), vocab.t2d):
        raise UserError(f"drafter={folder}: t2d and d2t disagree")
    return vocab
