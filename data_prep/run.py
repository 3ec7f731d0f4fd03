"""Prepared data of a recipe: prompts, answers, token rows, vocabulary map. `python -m data_prep.run recipe=NAME`

Three stages, each in a folder named by the hash of what it depends on: the prompts of each source, the answers, and the
rows with their split and map. A stage whose folder is there is skipped.
"""

import json
from collections import Counter
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from data_prep import contamination, shards
from data_prep.answers import Work, answer
from data_prep.conditions import conditions, one_sided, unread
from data_prep.dialogue import FATES, Terms
from data_prep.intake import collect
from data_prep.local import Loader, Local
from data_prep.probe import expected
from data_prep.prompts import Prompt, to_prompts
from data_prep.rows import Rows, read_lines, split_by_prompt, write_lines, write_rows
from data_prep.schemas import Record, to_record
from data_prep.server import Server
from data_prep.sources import SourceCost, check_sources, read_named
from data_prep.synthesis import synthesise
from data_prep.tally import Tally
from data_prep.template import arguments_read, edges
from data_prep.vocabulary import build_vocab, coverage, low_coverage, predicted, special_tokens
from data_prep.writer import Writer, noise_seed
from models.device import choose_device
from models.source import Source, load_tokenizer, look_up, resolve
from models.target import check_taps, load_target
from models.vocab import VocabMap, read_vocab, write_vocab
from recipes.cli import entry
from recipes.files import (
    cache_dir,
    check_writable,
    output_folder,
    read_json,
    sha256_json,
    user_path,
    whole_folder,
    write_json,
)
from recipes.schema import DataConfig, Recipe, SourceConfig, UserError

FORMAT = 3  # of the folders; raise it when their content changes for the same recipe


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
    """The target as known before its weights are loaded, and who writes as it."""

    def __init__(self, recipe: Recipe, loader: Loader, source: Source, writes: bool = True) -> None:
        self.recipe, self.loader, self.source, self.writes = recipe, loader, source, writes

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.source, self.recipe.target.trust_remote_code)

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids))

    @cached_property
    def terms(self) -> Terms:
        data, args = self.recipe.data, self.recipe.target.template_args
        ends = self.source.eos_ids | edges(self.tokenizer, "assistant", args).end_ids
        return Terms(self.tokenizer, args, ends, data.max_length, data.answer_tokens)

    @cached_property
    def writer(self) -> Writer:
        data = self.recipe.data
        if not self.writes:
            name = self.recipe.recipe
            raise UserError(f"no prepared data for this recipe yet. Run: python -m data_prep.run recipe={name}")
        if not data.server.url:
            return Local(self.loader, choose_device(self.recipe.device), data.dtype, data.slots)
        own = edges(self.tokenizer, "assistant", self.recipe.target.template_args).end_ids or self.source.eos_ids
        return Server(data.server, self.tokenizer, min(own), self.source.vocab_size, data.max_length)

    @property
    def identity(self) -> list[Any]:
        """What the target's words depend on, besides their temperature."""
        server = self.recipe.data.server
        by = [server.model] if server.url else []
        return [self.source.fingerprint, self.source.template_hash, self.recipe.target.template_args, *by]


def prepare(recipe: Recipe, target_loader: Loader, source: Source | None = None, *, writes: bool = True) -> Prepared:
    """Make what is missing and load the rest. One process: in a launch of several, the main one calls this first.

    `source` saves resolving the target again. The loader is called at most once, and not at all when all is current.
    Without `writes` the target is not asked to write, here or on a server: what it has not written is refused.
    """
    check_sources(recipe)
    lazy = Lazy(recipe, target_loader, source or resolve(recipe.target), writes)
    with output_folder(data_root(recipe)) as root:
        pairs, report = _prompts(recipe, lazy, root)
        answered = _answers(recipe, lazy, root, pairs)
        prepared = load_prepared(_rows(recipe, lazy, root, pairs, answered, report))
    _check_apart(recipe, lazy, pairs, prepared)
    return prepared


def data_root(recipe: Recipe) -> Path:
    return user_path(recipe.data.cache) if recipe.data.cache else cache_dir("data")


def load_prepared(folder: Path) -> Prepared:
    """Read a folder that `prepare` wrote; a damaged one is a UserError that says what to delete."""
    try:
        report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        vocab, stated = read_vocab(folder / "vocab.safetensors"), str(report["vocabulary"]["hash"])
        prompts = to_prompts(_read_records(folder / "validation_prompts.jsonl"), Tally())
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


def _prompts(recipe: Recipe, lazy: Lazy, root: Path) -> tuple[list[tuple[str, Record]], dict[str, Any]]:
    """(source name, record) of every source in order: no two ask the same, and none asks what is evaluated on."""
    pairs: list[tuple[str, Record]] = []
    reports: dict[str, Any] = {}
    for name, source in recipe.data.sources.items():
        found, reports[name] = _source_records(recipe, name, source, lazy, root)
        pairs += [(name, r) for r in found]
    kept, fell = contamination.sift(pairs, contamination.evaluation_sets(recipe), lazy.decode)
    for reason, count in fell.items():
        if count:
            print(f"data: {count} prompts left out ({reason})", flush=True)
    return kept, {"sources": reports, "prompts": len(kept), "fell": fell}


def _source_records(
    recipe: Recipe, name: str, source: SourceConfig, lazy: Lazy, root: Path
) -> tuple[list[Record], dict[str, Any]]:
    """Records of one source. Files are read each time; the hub's and the target's own are kept."""
    if source.kind == "file":
        return _given(name, source)
    wanted = [FORMAT, "prompts", name, asdict(source)]
    if source.kind == "self":
        wanted += [lazy.identity, recipe.seed]
    folder = root / f"prompts-{sha256_json(wanted)[:24]}"
    if _current(folder, f"prompts of {name}"):
        return _read_records(folder / "prompts.jsonl"), _report(folder)
    if source.kind == "hub":
        records, report = _given(name, source)
    else:
        seed = noise_seed(recipe.seed, name)
        prompts, counts = synthesise(lazy.writer, lazy.terms, name, source, seed)
        records, report = [p.conversation() for p in prompts], {"kind": "self", **counts}
        fell = ", ".join(f"{count} {reason}" for reason, count in counts["fell"].items())
        kept = f"{len(prompts)} kept, {counts['distinct']:.1%} of their word trigrams distinct"
        print(f"data: {name}: {counts['generated']} questions written, {kept}; fell: {fell}", flush=True)
    with whole_folder(folder) as aside:
        write_lines(aside / "prompts.jsonl", [to_record(r) for r in records])
        write_json(aside / "report.json", report)
    return records, report


def _given(name: str, source: SourceConfig) -> tuple[list[Record], dict[str, Any]]:
    """The records of a file or hub dataset, and what became of its rows."""
    records, tally = read_named(name, source)
    print(f"data: {name}: " + "\n  ".join(tally.lines()), flush=True)
    return records, {"kind": source.kind, "kept": len(records), **tally.report()}


def _answers(recipe: Recipe, lazy: Lazy, root: Path, pairs: list[tuple[str, Record]]) -> Path:
    data = recipe.data
    work = Work.of(pairs, data)
    # greedy answers do not depend on the seed
    seed = recipe.seed if any(data.temperatures) else 0
    wanted = {
        "format": FORMAT,
        "model": lazy.source.fingerprint,
        "template": lazy.source.template_hash,
        "template_args": recipe.target.template_args,
        "temperatures": list(data.temperatures),
        "answer_tokens": data.answer_tokens,
        "max_length": data.max_length,
        "seed": seed,
        "asked": sha256_json([[name, c.id, c.key] for name, c in work.asked]),
        "kept": sha256_json([[name, asdict(r)] for name, r in work.kept]),
    }
    folder = root / f"answers-{sha256_json([wanted, lazy.identity, data.dtype])[:24]}"
    if _current(folder, "answers"):
        return folder
    if not pairs:
        raise UserError("the sources of the recipe hold no prompt that can be used. Check data.sources.")
    report = answer(folder, work, lazy.writer, lazy.terms, data, seed, wanted)
    fates = ", ".join(f"{report[k]} {k}" for k in FATES[1:] if report[k] or k in ("truncated", "cut"))
    print(f"data: {report['rows']} answered rows, {report['answer_tokens']} tokens ({fates})", flush=True)
    counts = {**report["kept_refused"], **report["kept_mended"], **report["unanswered"]}
    for reason, texts in report["examples"].items():
        first, *others = texts  # in full, of which there may be a screen; of the others what they are called
        also = f" (also {', '.join(text.partition(': ')[0] for text in others)})" if others else ""
        print(f"data: {counts[reason]} x {reason}{also}: {first}", flush=True)
    if report["troubles"]:
        troubles = ", ".join(f"{count} x {kind}" for kind, count in report["troubles"].items())
        print(f"data: troubles with the server: {troubles}", flush=True)
    return folder


def _rows(
    recipe: Recipe, lazy: Lazy, root: Path, pairs: list[tuple[str, Record]], answered: Path, report: dict[str, Any]
) -> Path:
    data, size = recipe.data, recipe.eagle.draft_vocab
    vocab_size = lazy.source.vocab_size
    always = special_tokens(lazy.tokenizer, lazy.terms.stop_ids, vocab_size)
    dropped = [data.drop_loops, data.drop_truncated]
    key = sha256_json([FORMAT, "rows", answered.name, dropped, data.validation_rows, size, always])
    folder = root / f"rows-{key[:24]}"
    if _current(folder, "rows and vocabulary"):
        return folder
    rows = shards.read(answered)
    good = [i for i, m in enumerate(rows.meta) if not _dropped(m, data)]
    train, validation = (rows.subset(side) for side in split_by_prompt(rows, good, data.validation_rows))
    _refuse_unsupervised(train, validation, report, _report(answered), data.validation_rows)
    vocab = build_vocab(train, size, vocab_size, always)
    report = {
        **report,
        "hash": key,
        "target": {"fingerprint": lazy.source.fingerprint, "template": lazy.source.template_hash},
        "template_args": recipe.target.template_args,
        "conditions": conditions(_records(pairs, train), recipe.target.template_args),
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
    low = low_coverage(report["vocabulary"]["coverage"], "training")
    low += low_coverage(report["vocabulary"]["coverage_validation"], "validation")
    report["warnings"] = [*(f"{w}. Raise eagle.draft_vocab" for w in low), *report["answers"]["warnings"]]
    template = str(lazy.tokenizer.chat_template)
    report["warnings"] += one_sided(template, report["conditions"])
    report["warnings"] += unread(template, arguments_read(lazy.tokenizer), report["conditions"])
    with whole_folder(folder) as aside:
        write_rows(train, aside / "train")
        write_rows(validation, aside / "validation")
        write_vocab(vocab, aside / "vocab.safetensors")
        write_lines(aside / "validation_prompts.jsonl", _asked(pairs, validation))
        write_json(aside / "report.json", report)
    _say(report, folder)
    return folder


def _dropped(meta: dict[str, Any], data: DataConfig) -> bool:
    return (data.drop_loops and meta["loop"]) or (data.drop_truncated and meta["fate"] in ("truncated", "cut"))


def _check_apart(recipe: Recipe, lazy: Lazy, pairs: list[tuple[str, Record]], prepared: Prepared) -> None:
    """Count what the training prompts share with those of validation and evaluation; kept beside the rows."""
    sets = {**contamination.evaluation_sets(recipe), "validation": prepared.validation_prompts}
    path = prepared.folder / f"contamination-{sha256_json([[p.key for p in s] for s in sets.values()])[:16]}.json"
    if not path.is_file():
        trained = {(m["source"], m["id"]) for m in prepared.train.meta}
        questions = (contamination.asked(r, lazy.decode) for name, r in pairs if (name, r.id) in trained)
        write_json(path, contamination.contamination(questions, sets))
    for warning in contamination.warnings(read_json(path, "the contamination report")):
        print(f"data: warning: {warning}", flush=True)


def _asked(pairs: list[tuple[str, Record]], rows: Rows) -> list[dict[str, Any]]:
    """What the rows ask, each prompt once: those that can be put to a decoder."""
    return [to_record(p.conversation()) for p in to_prompts(_records(pairs, rows), Tally())]


def _records(pairs: list[tuple[str, Record]], rows: Rows) -> list[Record]:
    """The records that the rows came of, each once."""
    named = {(name, r.id): r for name, r in pairs}
    return [named[key] for key in dict.fromkeys((m["source"], m["id"]) for m in rows.meta)]


def _refuse_unsupervised(
    train: Rows, validation: Rows, prompts: dict[str, Any], answers: dict[str, Any], wanted: int
) -> None:
    if int(predicted(train).sum()):
        return
    counts = {k: answers[k] for k in FATES[1:]} | answers["kept_refused"] | answers["unanswered"]
    fell = ", ".join(f"{count} x {reason}" for reason, count in counts.items() if count)
    raise UserError(
        f"the dataset has no supervised token to train on: {prompts['prompts']} prompts became {answers['rows']} rows "
        f"({fell or 'none fell'}), {len(train)} for training beside {len(validation)} for validation "
        f"(data.validation_rows={wanted}). Mend what fell, or give more prompts, a larger data.max_length, or fewer "
        "validation rows."
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
        print(f"data: warning: {warning}", flush=True)


def _current(folder: Path, stage: str) -> bool:
    current = (folder / "report.json").is_file()
    print(f"data: {stage}: {'current, skipped' if current else 'to be made'} ({folder.name})", flush=True)
    return current


def _report(folder: Path) -> dict[str, Any]:
    return read_json(folder / "report.json", f"prepared data are damaged, delete {folder} and prepare again")


def _read_records(path: Path) -> list[Record]:
    try:
        lines = read_lines(path)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: prepared prompts cannot be read: {error}. Delete {path.parent} and prepare again."
        ) from error
    rows: list[tuple[int, str, Any]] = [(i, f"record {i}", value) for i, value in enumerate(lines, start=1)]
    return collect(rows, str(path), "")[0] if rows else []


def check(recipe: Recipe) -> tuple[list[SourceCost], Source | None]:
    """All mistakes in data and target that show without weights; what the data cost, and the target (None where a dry
    run would have to fetch it)."""
    costs = check_sources(recipe)
    prompts, held_out = sum(c.prompts for c in costs), recipe.data.validation_rows
    if prompts <= held_out and all(c.prompts >= 0 for c in costs):
        few = f"{prompts} prompts and data.validation_rows={held_out} may leave no row to train on"
        print(f"data: warning: {few}. Give more prompts, or lower it")
    check_writable(data_root(recipe))
    choose_device(recipe.device)
    source = look_up(recipe.target, recipe.dry_run)
    if source is not None:
        check_taps(recipe.target.taps, source.n_layers)
        edges(load_tokenizer(source, recipe.target.trust_remote_code), "assistant", recipe.target.template_args)
    return costs, source


def main(recipe: Recipe) -> None:
    contamination.evaluation_sets(recipe)  # read again, but before anything is generated
    costs, source = check(recipe)
    if recipe.dry_run:
        print(OmegaConf.to_yaml(OmegaConf.structured(recipe)))
        print(SourceCost.table(costs))
        print("\n".join(expected(recipe, SourceCost.load(costs))))
        return
    prepare(recipe, lambda dtype: load_target(recipe.target, choose_device(recipe.device), dtype), source)


if __name__ == "__main__":
    entry(main)
