"""Prepared data of a recipe: prompts, answers, token rows, vocabulary map. `python -m data_prep.run recipe=NAME`

Three stages, each in a folder named by the hash of what it depends on: the prompts of each source, the answers, and the
rows with their split and map. A stage whose folder is there is skipped.
"""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from data_prep.answers import answer_prompts, generation_dtype
from data_prep.duplicates import near_duplicates, normalised
from data_prep.prompts import Prompt, load_prompts, parse, read_file, read_hub, to_record
from data_prep.rows import Rows, read_lines, split_by_prompt, write_lines, write_rows
from data_prep.sources import SourceCost, check_sources
from data_prep.synthesis import synthesise
from data_prep.template import edges
from data_prep.vocabulary import build_vocab, coverage, low_coverage, predicted, special_tokens
from models.source import Source, load_tokenizer, resolve
from models.target import Target, choose_device, load_target
from models.vocab import VocabMap, read_vocab, write_vocab
from recipes.cli import entry
from recipes.files import cache_dir, make_folder, sha256_json, whole_folder, write_json
from recipes.schema import Recipe, SourceConfig, UserError

FORMAT = 1  # of the folders; raise it when their content changes for the same recipe
Loader = Callable[[torch.dtype], Target]


@dataclass(frozen=True)
class Prepared:
    """What training reads. `folder` is all another process needs: `load_prepared(folder)`."""

    train: Rows
    validation: Rows
    vocab: VocabMap
    folder: Path
    report: dict[str, Any]
    validation_prompts: list[Prompt]


class Lazy:
    """The target, loaded the first time that a stage needs it and known by its source before that."""

    def __init__(self, recipe: Recipe, loader: Loader, source: Source) -> None:
        self.recipe, self.loader, self.source = recipe, loader, source

    @cached_property
    def target(self) -> Target:
        dtype = generation_dtype(self.recipe.data.dtype, choose_device(self.recipe.device))
        target = self.loader(dtype)
        print(f"data: the target is loaded in {str(dtype).removeprefix('torch.')} on {target.device}", flush=True)
        return target

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.source, self.recipe.target.trust_remote_code)

    @property
    def identity(self) -> list[Any]:
        """What the target's words depend on, besides their temperature."""
        return [self.source.fingerprint, self.source.template_hash, self.recipe.target.template_args]


def prepare(recipe: Recipe, target_loader: Loader, source: Source | None = None) -> Prepared:
    """Make what is missing and load the rest. One process: in a launch of several, the main one calls this first.

    `source` saves resolving the target again. The loader is called at most once, and not at all when all is current.
    """
    check_sources(recipe)
    root = data_root(recipe)
    lazy = Lazy(recipe, target_loader, source or resolve(recipe.target))
    prompts, report = _prompts(recipe, lazy, root)
    answered = _answers(recipe, lazy, root, prompts)
    return load_prepared(_rows(recipe, lazy, root, prompts, answered, report))


def data_root(recipe: Recipe) -> Path:
    return make_folder(Path(recipe.data.cache).expanduser() if recipe.data.cache else cache_dir("data"))


def load_prepared(folder: Path) -> Prepared:
    """Read a folder that `prepare` wrote; a damaged one is a UserError that says what to delete."""
    try:
        report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        vocab, stated = read_vocab(folder / "vocab.safetensors"), str(report["vocabulary"]["hash"])
        prompts = _read_prompts(folder / "validation_prompts.jsonl")
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{folder}: prepared data cannot be read: {error}. Delete the folder and prepare again."
        ) from error
    if vocab.hash() != stated:
        raise UserError(
            f"{folder}: its vocabulary map (hash {vocab.hash()[:12]}) is not the one that report.json names "
            f"({stated[:12]}). Delete the folder and prepare again."
        )
    return Prepared(Rows.load(folder / "train"), Rows.load(folder / "validation"), vocab, folder, report, prompts)


def _prompts(recipe: Recipe, lazy: Lazy, root: Path) -> tuple[list[tuple[str, Prompt]], dict[str, Any]]:
    """(source name, prompt) of every source in order, no two alike and none of those that `report` evaluates on."""
    pairs: list[tuple[str, Prompt]] = []
    reports: dict[str, Any] = {}
    for name, source in recipe.data.sources.items():
        found, reports[name] = _source_prompts(recipe, name, source, lazy, root)
        pairs += [(name, p) for p in found]
    shipped = [" ".join(p.turns) for p in load_prompts("report")]
    evaluated = near_duplicates([" ".join(p.turns) for _, p in pairs], against=shipped, among=False)
    seen: set[str] = set()
    kept: list[tuple[str, Prompt]] = []
    fell = Counter({"in_report": sum(evaluated), "repeated": 0})
    for (name, prompt), used in zip(pairs, evaluated, strict=True):
        text = "\n".join(normalised(t) for t in [prompt.system or "", *prompt.turns])
        if not used and text not in seen:
            kept.append((name, prompt))
        fell["repeated"] += not used and text in seen
        seen.add(text)
    for reason, count in fell.items():
        if count:
            print(f"data: {count} prompts left out ({reason})", flush=True)
    return kept, {"sources": reports, "prompts": len(kept), "fell": dict(fell)}


def _source_prompts(
    recipe: Recipe, name: str, source: SourceConfig, lazy: Lazy, root: Path
) -> tuple[list[Prompt], dict[str, Any]]:
    """Prompts of one source. Files are read each time; the hub's and the target's own are kept."""
    if source.kind == "file":
        prompts = read_file(Path(source.path).expanduser())
        chosen = prompts[: source.rows] if source.rows else prompts
        return chosen, {"kind": "file", "read": len(prompts), "kept": len(chosen)}
    wanted = [FORMAT, "prompts", name, asdict(source)]
    if source.kind == "self":
        wanted += [lazy.identity, recipe.seed]
    folder = root / f"prompts-{sha256_json(wanted)[:24]}"
    if _current(folder, f"prompts of {name}"):
        return _read_prompts(folder / "prompts.jsonl"), _report(folder)
    if source.kind == "hub":
        prompts = read_hub(source.path, source.split, source.column, source.rows)
        report: dict[str, Any] = {"kind": "hub", "kept": len(prompts)}
    else:
        args, slots = recipe.target.template_args, recipe.data.slots
        seed = int(sha256_json([recipe.seed, name])[:8], 16)
        prompts, counts = synthesise(lazy.target, name, source, args, slots, seed)
        report = {"kind": "self", **counts}
        fell = ", ".join(f"{count} {reason}" for reason, count in counts["fell"].items())
        print(f"data: {name}: {counts['generated']} questions written, {len(prompts)} kept; fell: {fell}", flush=True)
    with whole_folder(folder) as aside:
        write_lines(aside / "prompts.jsonl", [to_record(p) for p in prompts])
        write_json(aside / "report.json", report)
    return prompts, report


def _answers(recipe: Recipe, lazy: Lazy, root: Path, prompts: list[tuple[str, Prompt]]) -> Path:
    data = recipe.data
    asked = sha256_json([[name, p.id, p.key] for name, p in prompts])
    # greedy answers do not depend on the seed
    seed = recipe.seed if any(data.temperatures) else 0
    wanted = [data.max_length, data.answer_tokens, data.temperatures, data.dtype, seed]
    folder = root / f"answers-{sha256_json([FORMAT, 'answers', asked, lazy.identity, *wanted])[:24]}"
    if _current(folder, "answers"):
        return folder
    if not prompts:
        raise UserError("the sources of the recipe hold no prompt that can be used. Check data.sources.")
    rows, report = answer_prompts(lazy.target, prompts, data, recipe.target.template_args, seed)
    with whole_folder(folder) as aside:
        write_rows(rows, aside / "rows")
        write_json(aside / "report.json", report)
    fates = ", ".join(f"{report[k]} {k}" for k in ("truncated", "cut", "no_room", "empty"))
    print(f"data: {report['rows']} answers, {report['answer_tokens']} tokens ({fates})", flush=True)
    return folder


def _rows(
    recipe: Recipe, lazy: Lazy, root: Path, prompts: list[tuple[str, Prompt]], answered: Path, report: dict[str, Any]
) -> Path:
    data, size = recipe.data, recipe.eagle.draft_vocab
    vocab_size = _vocab_size(lazy.source)
    ends = lazy.source.eos_ids | edges(lazy.tokenizer, "assistant", recipe.target.template_args).end_ids
    always = special_tokens(lazy.tokenizer, ends, vocab_size)
    key = sha256_json([FORMAT, "rows", answered.name, data.drop_loops, data.validation_rows, size, always])
    folder = root / f"rows-{key[:24]}"
    if _current(folder, "rows and vocabulary"):
        return folder
    rows = Rows.load(answered / "rows")
    good = [i for i, m in enumerate(rows.meta) if not (data.drop_loops and m["loop"])]
    train, validation = (rows.subset(side) for side in split_by_prompt(rows, good, data.validation_rows))
    _refuse_unsupervised(train, validation, report, _report(answered), data.validation_rows)
    vocab = build_vocab(train, size, vocab_size, always)
    report = {
        **report,
        "hash": key,
        "target": {"fingerprint": lazy.source.fingerprint, "template": lazy.source.template_hash},
        "template_args": recipe.target.template_args,
        "answers": {**_report(answered), "loops": sum(m["loop"] for m in rows.meta), "loops_dropped": data.drop_loops},
        "train": _describe(train),
        "validation": _describe(validation),
        "vocabulary": {
            "draft": vocab.size,
            "target": vocab_size,
            "hash": vocab.hash(),
            "coverage": coverage(train, vocab),
            "coverage_validation": coverage(validation, vocab),
        },
    }
    covered = report["vocabulary"]
    report["warnings"] = low_coverage(covered["coverage"], "training")
    report["warnings"] += low_coverage(covered["coverage_validation"], "validation")
    by_key = {(name, p.id): p for name, p in prompts}
    with whole_folder(folder) as aside:
        write_rows(train, aside / "train")
        write_rows(validation, aside / "validation")
        write_vocab(vocab, aside / "vocab.safetensors")
        held_out = dict.fromkeys((m["source"], m["id"]) for m in validation.meta)
        write_lines(aside / "validation_prompts.jsonl", [to_record(by_key[name]) for name in held_out])
        write_json(aside / "report.json", report)
    _say(report, folder)
    return folder


def _refuse_unsupervised(
    train: Rows, validation: Rows, prompts: dict[str, Any], answers: dict[str, Any], wanted: int
) -> None:
    if int(predicted(train).sum()):
        return
    counts = {k: answers[k] for k in ("prompts", "rows", "truncated", "cut", "no_room", "empty")}
    raise UserError(
        f"the dataset has no supervised token to train on: {prompts['prompts']} prompts, answers {counts}, "
        f"{len(train)} rows for training beside {len(validation)} for validation (data.validation_rows={wanted}). "
        "Give more prompts, a larger data.max_length, or fewer validation rows."
    )


def _describe(rows: Rows) -> dict[str, Any]:
    longest = int(rows.lengths.max()) if len(rows) else 0
    return {
        "rows": len(rows),
        "tokens": len(rows.ids),
        "supervised_tokens": int(predicted(rows).sum()),
        "longest": longest,
        "by_source": dict(Counter(m["source"] for m in rows.meta)),
        "by_category": dict(Counter(m["category"] for m in rows.meta)),
        "by_temperature": dict(Counter(str(m["temperature"]) for m in rows.meta)),
        "fates": dict(Counter(m["fate"] for m in rows.meta)),
    }


def _say(report: dict[str, Any], folder: Path) -> None:
    train, validation, vocabulary = report["train"], report["validation"], report["vocabulary"]
    covered, held_out = vocabulary["coverage"]["overall"], vocabulary["coverage_validation"]["overall"]
    for line in (
        f"{train['rows']} training rows, {train['supervised_tokens']:,} supervised tokens of {train['tokens']:,}; "
        f"{validation['rows']} validation rows; {report['answers']['loops']} answers in loops",
        f"draft vocabulary {vocabulary['draft']:,} of {vocabulary['target']:,}, covers {covered:.2%} of the training "
        f"tokens and {held_out:.2%} of the validation tokens",
        str(folder),
    ):
        print(f"data: {line}", flush=True)
    for warning in report["warnings"]:
        print(f"data: warning: {warning}. Raise eagle.draft_vocab.", flush=True)


def _current(folder: Path, stage: str) -> bool:
    current = (folder / "report.json").is_file()
    print(f"data: {stage}: {'current, skipped' if current else 'to be made'} ({folder.name})", flush=True)
    return current


def _report(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return report


def _read_prompts(path: Path) -> list[Prompt]:
    return [parse(r, f"{path}, record {i}", str(i), path.stem) for i, r in enumerate(read_lines(path), start=1)]


def _vocab_size(source: Source) -> int:
    config = json.loads((source.folder / "config.json").read_text(encoding="utf-8"))
    return int(config.get("text_config", config)["vocab_size"])


def main(recipe: Recipe) -> None:
    costs = check_sources(recipe)
    if recipe.dry_run:
        print(OmegaConf.to_yaml(OmegaConf.structured(recipe)))
        print(SourceCost.table(costs))
        return
    prepare(recipe, lambda dtype: load_target(recipe.target, choose_device(recipe.device), dtype))


if __name__ == "__main__":
    entry(main)
