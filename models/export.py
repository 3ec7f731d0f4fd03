"""Write a drafter, of whatever layout, in the layout of an engine.

    python -m models.export drafter=DIR layout=vllm|sglang|speculators|portable out=DIR

    target=PATH         of the drafter, where its provenance does not name it or speculators needs another name
    serving_length=N    tokens that the engine will be started with; else the target's positions, where it is at hand
    dry_run=true        check all of it, write nothing

What the layout can't express is refused with the reason; nothing is left out or changed. The new folder has its papers
(provenance.json) and a model card of its own (README.md).
"""

import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.card import publishable, target_licence, target_name, write_card
from models.eagle3 import Eagle3Config
from models.imports import MOST, Stored
from models.layout_tables import LAYOUTS, SPECULATORS, why_not
from models.layouts import Verifier, check_drafter, find_drafter, read_drafter, read_provenance, save_drafter
from models.source import Source, on_the_hub, resolve
from models.weights import target_table
from recipes.cli import told
from recipes.files import check_writable, read_json, user_path, whole_folder
from recipes.schema import TargetConfig, UserError, did_you_mean

WRITTEN = ("README.md", "config.json", "model.safetensors", "provenance.json")  # what an export consists of


@dataclass(frozen=True)
class Request:
    drafter: str = ""
    layout: str = ""
    out: str = ""
    target: str = ""
    serving_length: str = ""
    dry_run: str = "false"


def parse(argv: list[str]) -> Request:
    known = [f.name for f in fields(Request)]
    given: dict[str, str] = {}
    for argument in argv:
        key, equals, value = argument.partition("=")
        if not equals:
            raise UserError(f"argument {argument!r} is not of the form key=value. Keys: {', '.join(known)}")
        if key not in known:
            hint = did_you_mean(key, known, 0.4) or f" Known: {', '.join(known)}"
            raise UserError(f"unknown key {key!r}.{hint}")
        given[key] = value
    request = Request(**given)
    missing = [f"{key}=" for key in ("drafter", "layout", "out") if not getattr(request, key)]
    if missing:
        raise UserError(f"give {' '.join(missing)} (layout: one of {', '.join(LAYOUTS)})")
    if request.layout not in LAYOUTS:
        raise UserError(f"layout={request.layout} is not one of {', '.join(LAYOUTS)}")
    length = request.serving_length
    if length and not (length.isascii() and length.isdigit() and len(length) < 10 and int(length) > 0):
        raise UserError(f"serving_length={length[:20]!r} must be a whole number above 0")
    if request.dry_run not in ("true", "false"):
        raise UserError(f"dry_run={request.dry_run} must be true or false")
    return request


def run(request: Request) -> None:
    folder = find_drafter(request.drafter)
    try:
        out = user_path(request.out).resolve()
    except RuntimeError as error:
        raise UserError(f"out={request.out} goes through a loop of links: give another folder") from error
    refuse_out(out, folder)
    papers = read_provenance(folder)
    stored = check_drafter(folder, None, quiet=True)
    source = find_target(request, stored, papers)
    fingerprint = source.fingerprint if source else papers.get("fingerprint")
    layers = source.n_layers if source else papers.get("target_layers")
    if not fingerprint or type(layers) is not int or not 0 < layers <= MOST:
        raise UserError(f"drafter={folder} does not say which target it is for: give target=")
    check_drafter(folder, source, quiet=True)
    config = stored.config(layers)
    refuse(request, stored, config, source)
    about = f"{config.draft_vocab_size} of {config.vocab_size} tokens, taps {list(config.taps)}"
    if request.dry_run == "true":
        print(f"dry_run: true\n{folder} ({about}) can be written for {request.layout}; nothing was")
        return
    embedding, head = tables(source, stored, request.layout)
    drafter = read_drafter(stored, layers, embedding, head)
    verifier = None
    if request.layout == SPECULATORS:
        assert source is not None and embedding is not None, "`refuse` has looked"
        architectures = read_json(source.folder / "config.json", "target")["architectures"]
        verifier = Verifier(verifier_name(source.name), architectures, embedding)
    origin = request.drafter if on_the_hub(request.drafter) else str(folder)
    papers |= {"fingerprint": fingerprint, "exported": {"from": origin, "layout": request.layout}}
    papers["target"] = papers.get("target", {}) | about_target(source, papers)
    with whole_folder(out) as aside:
        save_drafter(drafter, aside, publishable(papers), stored.dtype, request.layout, verifier)
        write_card(aside)
    print(f"{request.out}: {about}, for {request.layout}")
    if verifier and not on_the_hub(verifier.name_or_path):
        print(
            f"its config.json calls the target {verifier.name_or_path!r}, not by a path of this machine; for a hub id "
            "there, give target=OWNER/NAME"
        )


def verifier_name(target: str) -> str:
    """A hub id, or the last part of a path, without a suffix."""
    name = target_name(target)
    return name if on_the_hub(name) else Path(name).name.removesuffix(".gguf")


def refuse_out(out: Path, drafter: Path) -> None:
    """An export takes the place of what is there: of another export alone."""
    if out == drafter.resolve():
        raise UserError(f"out={out} is the drafter itself: give another folder")
    there = sorted(p.name for p in out.iterdir()) if out.is_dir() else []
    if there and "exported" not in read_provenance(out):
        raise UserError(f"out={out} holds something that is no export, which would be lost: give another folder")
    if others := [name for name in there if name not in WRITTEN]:
        raise UserError(f"out={out} holds {', '.join(others[:4])} beside an export, which would be lost: move it away")
    check_writable(out)


def about_target(source: Source | None, papers: dict[str, Any]) -> dict[str, str]:
    """What can be said of the target, which need not be at hand."""
    path = source.name if source else str(papers.get("target", {}).get("path") or "")
    if not path:
        return {}
    folder = source.folder if source else user_path(path)
    said = {"path": path, "licence": target_licence(TargetConfig(path=path), folder)}
    if source:
        said["template"] = source.template_hash
    return {key: value for key, value in said.items() if value}


def find_target(request: Request, stored: Stored, papers: dict[str, Any]) -> Source | None:
    """The target where it is named, or needed and named by the drafter's provenance."""
    path = request.target
    needed = request.layout == SPECULATORS or "embed_tokens.weight" in stored.names or stored.borrows_head
    if not path and needed:
        path = papers.get("target", {}).get("path", "")
        if not path:
            what = "the speculators layout names it and holds its embedding"
            why = what if request.layout == SPECULATORS else "its embedding or head stands for the drafter's"
            raise UserError(f"drafter={stored.folder}: give target=, since {why}")
        if not (on_the_hub(path) or path.startswith("package:") or Path(path).is_dir()):
            raise UserError(
                f"drafter={stored.folder}: its papers call its target {path!r}: give target= and where it is"
            )
    return resolve(TargetConfig(path=path)) if path else None


def refuse(request: Request, stored: Stored, config: Eagle3Config, source: Source | None) -> None:
    """Everything for which the layout, or an engine that serves it, would not do."""
    reasons = why_not(config, request.layout)
    if stored.window is not None:
        reasons.append(f"a sliding window of {stored.window} tokens, which this version does not write")
    length = int(request.serving_length or (source.max_positions if source else 0))
    if config.max_position_embeddings < length:
        reasons.append(
            f"its max_position_embeddings is {config.max_position_embeddings}, below the {length} that will be served: "
            f"engines crash or slow down there. Serve no more (serving_length={config.max_position_embeddings}; "
            f"vLLM --max-model-len, SGLang --context-length), or train one for longer text"
        )
    if reasons:
        raise UserError(f"layout={request.layout} cannot express {stored.folder}: {'; '.join(reasons)}")


def tables(source: Source | None, stored: Stored, layout: str) -> tuple[Tensor | None, Tensor | None]:
    """The target's embedding and head, where the drafter or its new layout needs them."""
    if source is None or not (layout == SPECULATORS or "embed_tokens.weight" in stored.names or stored.borrows_head):
        return None, None
    embedding = target_table(source.folder, "embed_tokens.weight")
    head = target_table(source.folder, "lm_head.weight") if stored.borrows_head else None
    if embedding is None:
        raise UserError(f"target {source.name}: no embedding found in {source.folder}")
    return embedding.to(torch.float32), embedding if stored.borrows_head and head is None else head


def main(argv: list[str]) -> None:
    if {"-h", "--help"} & set(argv):
        print((__doc__ or "").strip())
        return
    run(parse(argv))


if __name__ == "__main__":
    told(lambda: main(sys.argv[1:]))
