"""Rows of files and hub datasets as records, streamed: JSON lines (plain, .gz, .zst), a JSON array, Parquet, hub."""

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from data_prep.schemas import Record, read_row
from data_prep.tally import Refused, Tally
from recipes.files import near_names, user_path
from recipes.schema import SourceConfig, UserError

SUFFIXES = (".jsonl", ".json", ".zst", ".gz", ".parquet")
FORMATS = "JSON lines (.jsonl), a JSON array (.json), either of them .gz or .zst, or .parquet"
BATCH = 1024  # rows of a Parquet file that are in memory at a time
Row = tuple[int, str, Any]  # number, where it stands, its value or why it has none


def read_source(source: SourceConfig) -> tuple[list[Record], Tally]:
    """The records of a `file` or `hub` source, at most `source.rows`, and what became of every row that was read."""
    if source.kind == "hub":
        rows, name = hub_rows(source.path, source.split), source.path.rstrip("/").rsplit("/", 1)[-1]
        return collect(rows, f"hub dataset {source.path!r}", name, source.column, source.rows)
    return read_path(user_path(source.path), source.column, source.rows)


def read_path(path: Path, column: str = "", limit: int = 0) -> tuple[list[Record], Tally]:
    name = Path(path.name)
    while name.suffix in SUFFIXES:
        name = name.with_suffix("")
    return collect(file_rows(path), str(path), name.name, column, limit)


def collect(rows: Iterable[Row], what: str, name: str, column: str = "", limit: int = 0) -> tuple[list[Record], Tally]:
    """Records with ids that differ, until there are `limit` (0 = all). UserError when no row can be used."""
    tally = Tally()
    records: list[Record] = []
    for number, where, value in rows:
        tally.read += 1
        try:
            if isinstance(value, Refused):
                raise value
            mended: list[str] = []
            record, schema = read_row(value, f"{name}-{number}", name, mended.append, column)
        except Refused as refusal:
            tally.refuse(refusal, where)
            continue
        if record.id in tally.places:
            mended.append("an id that an earlier row has: its place is added")
            record = replace(record, id=f"{record.id}#{number}")
        tally.places[record.id] = where
        for rule in dict.fromkeys(mended):
            tally.repair(rule, where)
        tally.schemas[schema] += 1
        records.append(record)
        if len(records) == limit:
            break
    if not records:
        raise UserError("\n  ".join([f"{what} holds no row that can be used:", *tally.lines()]))
    return records, tally


def file_rows(path: Path) -> Iterator[Row]:
    """(number, place, value) of each row. Damage to the whole file is a UserError, damage to a row is its value."""
    check_file(path)
    try:
        if path.suffix == ".parquet":
            yield from _parquet_rows(path)
        else:
            with _opened(path) as stream:
                yield from _json_rows(stream, path)
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path} cannot be read to its end: {reason}. Fetch or write it again.") from error


def check_file(path: Path) -> None:
    """Say what is wrong with a path before anything is read."""
    if path.is_file():
        return
    if path.is_dir():
        inside = sorted(p.name for p in path.iterdir() if p.suffix in SUFFIXES)
        names = f"Name a file in it: {', '.join(inside[:8])}" if inside else f"It holds no {', '.join(SUFFIXES)} file"
        raise UserError(f"{path} is a folder, not a file. {names}")
    where = "" if path.is_absolute() else f" in {Path.cwd()}"
    raise UserError(f"prompt file {path} does not exist{where}.{near_names(path)} Give the path of a file that does")


def _opened(path: Path) -> io.BufferedIOBase:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")
    if path.suffix == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))
    return path.open("rb")


def _json_rows(stream: io.BufferedIOBase, path: Path) -> Iterator[Row]:
    first = not {".json", ".jsonl"} & set(path.suffixes)  # of a file whose name does not say that it is JSON
    for number, line in enumerate(stream, start=1):
        if number == 1:
            if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise UserError(f"{path} is UTF-16, not UTF-8 text. Convert it: iconv -f UTF-16 -t UTF-8 {path.name}")
            line = line.removeprefix(codecs.BOM_UTF8)
            if ".json" in path.suffixes and line.lstrip().startswith(b"["):  # one array, as ShareGPT is handed round
                whole = line + stream.read()
                yield from ((i, f"element {i}", value) for i, value in enumerate(json.loads(whole)))
                return
        if line.strip():
            value = _parse(line)
            if first and isinstance(value, Refused):
                raise UserError(f"{path} is not of a format that is read here: {FORMATS}. Write it as one of them")
            first = False
            yield number, f"line {number}", value


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Refused("not UTF-8 text", f"byte {line[error.start]:#04x} at position {error.start}")
    except (json.JSONDecodeError, RecursionError) as error:
        return Refused("not valid JSON", str(error))


def _parquet_rows(path: Path) -> Iterator[Row]:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        number = 0
        for batch in file.iter_batches(batch_size=BATCH):
            for value in batch.to_pylist():
                yield number, f"row {number}", without_nulls(value)
                number += 1


def hub_rows(dataset: str, split: str) -> Iterator[Row]:
    """Rows of a hub dataset as they stream in; offline, those of the hub's cache."""
    from datasets import load_dataset

    try:
        try:
            rows = load_dataset(dataset, split=split, streaming=True)
        except NotImplementedError:  # what lies in the cache does not stream
            rows = load_dataset(dataset, split=split)
        for number, value in enumerate(rows):
            yield number, f"row {number}", without_nulls(value)
    except Exception as error:  # the hub client and the dataset's own files raise anything
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"hub dataset {dataset!r} (split {split!r}) cannot be loaded: {reason}. "
            "Check the id and the network, or give a file of prompts."
        ) from error


def without_nulls(value: Any) -> Any:
    """Arrow gives every object of a column the keys of all others, with null: such a key was never there."""
    if isinstance(value, Mapping):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list) and value and isinstance(value[0], Mapping | list):
        return [without_nulls(v) for v in value]
    return value
