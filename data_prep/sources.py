"""What can be said of a recipe's data before any weight is loaded: mistakes, and what it will cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from data_prep.intake import read_source
from data_prep.probe import Load, folder_at_hand
from data_prep.schemas import Conversation, Record, Rendered
from data_prep.synthesis import A_LIST, LIST_TOKENS, SURPLUS
from data_prep.tally import Tally
from recipes.schema import KINDS, DataConfig, Recipe, SourceConfig, UserError

BYTES_PER_TOKEN = 5  # int32 id and uint8 mark
SAMPLED = 256  # records of a file whose lengths are looked at
CHARACTERS = 4  # a token, where the tokenizer is not at hand
MARKUP = 5  # tokens that a template puts around a turn, about


@dataclass(frozen=True)
class SourceCost:
    """Upper bounds; a hub source without `rows` is not known before it is fetched (prompts < 0)."""

    name: str
    kind: str
    prompts: int
    written_tokens: int  # questions that the target writes, those that fall included
    asked_tokens: int  # of prompts that the target answers or that stand before kept answers; of files an estimate
    answer_tokens: int
    kept_tokens: int  # answers that the source came with, an estimate
    row_bytes: int
    rows: tuple[str, ...] = ()  # of a file that was read: what is mended and what refused

    @staticmethod
    def table(costs: list["SourceCost"]) -> str:
        lines = []
        for c in costs:
            if c.prompts < 0:
                lines.append(f"  {c.name} ({c.kind}): as many prompts as the dataset has; set rows to bound it")
                continue
            kept = f", about {c.kept_tokens:,} answer tokens kept" if c.kept_tokens else ""
            lines.append(
                f"  {c.name} ({c.kind}): {c.prompts:,} prompts, at most {c.written_tokens:,} question tokens and "
                f"{c.answer_tokens:,} answer tokens generated{kept}, {c.row_bytes / 1e6:,.1f} MB of rows on disk"
            )
            lines += [f"    {line}" for line in c.rows]
        known = [c for c in costs if c.prompts >= 0]
        tokens = sum(c.written_tokens + c.answer_tokens for c in known)
        # answers and rows are both kept
        disk = 2 * sum(c.row_bytes for c in known) / 1e6
        total = f"total: {sum(c.prompts for c in known):,} prompts, at most {tokens:,} generated tokens, {disk:,.1f} MB"
        return "\n".join(["data preparation will cost (upper bounds):", *lines, total])

    @staticmethod
    def load(costs: list["SourceCost"]) -> Load:
        known = [c for c in costs if c.prompts >= 0]
        return Load(
            sum(c.prompts for c in known),
            sum(c.written_tokens for c in known),
            sum(c.asked_tokens for c in known),
            sum(c.answer_tokens for c in known),
            sum(c.kept_tokens for c in known),
        )


def check_sources(recipe: Recipe) -> list[SourceCost]:
    """Refuse what is wrong in `data`, naming the key; then the cost of each source."""
    data = recipe.data
    _check_numbers(data)
    if not data.sources:
        raise UserError("data.sources is empty: name at least one, e.g. data.sources.chat={kind: self, rows: 1000}")
    return [_source_cost(name, source, recipe) for name, source in data.sources.items()]


def read_named(name: str, source: SourceConfig) -> tuple[list[Record], Tally]:
    """As `read_source`, with the recipe's key in front of what is wrong."""
    try:
        return read_source(source)
    except UserError as error:
        raise UserError(f"data.sources.{name}.path: {error}") from error


def _source_cost(name: str, source: SourceConfig, recipe: Recipe) -> SourceCost:
    data = recipe.data
    key = f"data.sources.{name}"
    if source.kind not in KINDS:
        raise UserError(f"{key}.kind={source.kind!r} is not one of {', '.join(KINDS)}")
    if source.rows < 0:
        raise UserError(f"{key}.rows={source.rows} must not be negative (0 = all)")
    if source.kind in ("file", "hub") and not source.path:
        raise UserError(f"{key}.path is empty: a source of kind {source.kind} needs one")
    written, kept, rows_read = 0, 0, list[str]()
    asked = max(0, data.max_length - data.answer_tokens)  # for each prompt: what leaves room for a whole answer
    if source.kind == "self":
        if source.rows == 0:
            raise UserError(f"{key}.rows is 0: self-synthesis needs the number of questions to keep, e.g. 1000")
        if source.max_tokens < 1 or min(source.temperatures, default=-1) < 0 or not source.openings:
            raise UserError(f"{key}: max_tokens must be at least 1, temperatures at least 0 and openings not empty")
        if 0 in source.temperatures and source.rows > len(source.openings):
            raise UserError(f"{key}.temperatures=[0] writes the same question for the same opening. Use e.g. [1.0]")
        count = source.rows
        written = ceil(SURPLUS * count) * source.max_tokens + ceil(source.subjects / A_LIST) * LIST_TOKENS
        asked = min(asked, source.max_tokens)
    elif source.kind == "file":
        records, tally = read_named(name, source)
        count, rows_read = len(records), tally.lines()[1:]
        asked, kept = _lengths(records, recipe)
    else:
        count = source.rows or -1
    rows = max(0, count)
    keep = source.answers == "keep"
    return SourceCost(
        name,
        source.kind,
        count,
        written,
        rows * asked,
        0 if keep else rows * data.answer_tokens,
        rows * kept if keep else 0,
        rows * data.max_length * BYTES_PER_TOKEN,
        tuple(rows_read),
    )


def _lengths(records: Sequence[Record], recipe: Recipe) -> tuple[int, int]:
    """Tokens of a record's questions and of its answers, the mean over a sample."""
    from transformers import AutoTokenizer

    sample = records[:: max(1, len(records) // SAMPLED)]
    folder = folder_at_hand(recipe.target)
    tokenizer = AutoTokenizer.from_pretrained(folder) if folder else None

    def length(text: str) -> float:
        return len(tokenizer(text)["input_ids"]) if tokenizer is not None else len(text) / CHARACTERS

    asked = answered = 0.0
    for record in sample:
        if isinstance(record, Conversation):
            counts = [(m["role"] == "assistant", length(m["content"]) + MARKUP) for m in record.messages]
            answered += sum(count for is_answer, count in counts if is_answer)
            asked += sum(count for is_answer, count in counts if not is_answer)
        elif isinstance(record, Rendered):
            answered += length(record.text)
        else:
            answered += len(record.marks) - record.marks.count(0)
            asked += record.marks.count(0)
    return ceil(asked / len(sample)), ceil(answered / len(sample))


def _check_numbers(data: DataConfig) -> None:
    least = {"max_length": 4, "answer_tokens": 2, "slots": 1, "validation_rows": 1}
    values = {"max_length": data.max_length, "answer_tokens": data.answer_tokens, "slots": data.slots}
    values["validation_rows"] = data.validation_rows
    for key, value in values.items():
        if value < least[key]:
            raise UserError(f"data.{key}={value} must be at least {least[key]}")
    if not data.temperatures or any(t < 0 for t in data.temperatures):
        raise UserError(f"data.temperatures={list(data.temperatures)} must hold at least one number, none below 0")
    if data.dtype not in ("auto", "float32", "bfloat16", "float16", "float64"):
        raise UserError(f"data.dtype={data.dtype!r} is not one of auto, float32, bfloat16, float16, float64")
