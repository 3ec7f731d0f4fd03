"""What can be said of a recipe's data before any weight is loaded: mistakes, and what it will cost."""

from dataclasses import dataclass
from math import ceil
from pathlib import Path

from data_prep.prompts import read_file
from data_prep.synthesis import SURPLUS
from recipes.schema import DataConfig, Recipe, SourceConfig, UserError

KINDS = ("file", "hub", "self")
BYTES_PER_TOKEN = 5  # int32 id and uint8 mark


@dataclass(frozen=True)
class SourceCost:
    """Upper bounds; a hub source without `rows` is not known before it is fetched (prompts < 0)."""

    name: str
    kind: str
    prompts: int
    written_tokens: int  # questions that the target writes, those that fall included
    answer_tokens: int
    row_bytes: int

    @staticmethod
    def table(costs: list["SourceCost"]) -> str:
        lines = []
        for c in costs:
            if c.prompts < 0:
                lines.append(f"  {c.name} ({c.kind}): as many prompts as the dataset has; set rows to bound it")
                continue
            lines.append(
                f"  {c.name} ({c.kind}): {c.prompts:,} prompts, at most {c.written_tokens:,} question tokens and "
                f"{c.answer_tokens:,} answer tokens generated, {c.row_bytes / 1e6:,.1f} MB of rows on disk"
            )
        known = [c for c in costs if c.prompts >= 0]
        tokens = sum(c.written_tokens + c.answer_tokens for c in known)
        # answers and rows are both kept
        disk = 2 * sum(c.row_bytes for c in known) / 1e6
        total = f"total: {sum(c.prompts for c in known):,} prompts, at most {tokens:,} generated tokens, {disk:,.1f} MB"
        return "\n".join(["data preparation will cost (upper bounds):", *lines, total])


def check_sources(recipe: Recipe) -> list[SourceCost]:
    """Refuse what is wrong in `data`, naming the key; then the cost of each source."""
    data = recipe.data
    _check_numbers(data)
    if not data.sources:
        raise UserError("data.sources is empty: name at least one, e.g. data.sources.chat={kind: self, rows: 1000}")
    return [_source_cost(name, source, data) for name, source in data.sources.items()]


def _source_cost(name: str, source: SourceConfig, data: DataConfig) -> SourceCost:
    key = f"data.sources.{name}"
    if source.kind not in KINDS:
        raise UserError(f"{key}.kind={source.kind!r} is not one of {', '.join(KINDS)}")
    if source.rows < 0:
        raise UserError(f"{key}.rows={source.rows} must not be negative (0 = all)")
    if source.kind in ("file", "hub") and not source.path:
        raise UserError(f"{key}.path is empty: a source of kind {source.kind} needs one")
    written = 0
    if source.kind == "self":
        if source.rows == 0:
            raise UserError(f"{key}.rows is 0: self-synthesis needs the number of questions to keep, e.g. 1000")
        if source.max_tokens < 1 or source.temperature < 0 or not source.openings:
            raise UserError(f"{key}: max_tokens must be at least 1, temperature at least 0 and openings not empty")
        if source.temperature == 0 and source.rows > len(source.openings):
            raise UserError(f"{key}.temperature=0 writes the same question for the same opening. Use e.g. 1.0")
        count = source.rows
        written = ceil(SURPLUS * count) * source.max_tokens
    elif source.kind == "file":
        count = len(read_file(Path(source.path).expanduser()))
        count = min(count, source.rows) if source.rows else count
    else:
        count = source.rows or -1
    rows = max(0, count)
    return SourceCost(
        name, source.kind, count, written, rows * data.answer_tokens, rows * data.max_length * BYTES_PER_TOKEN
    )


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
