"""Files of every kind hold the same rows; damage to a row is counted and named, damage to a file is refused."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from data_prep.intake import hub_rows, read_path, read_source
from data_prep.schemas import Conversation
from recipes.schema import SourceConfig, UserError

ROWS: list[dict[str, Any]] = [
    {"id": "a", "messages": [{"role": "user", "content": "höflich\u2028"}, {"role": "assistant", "content": "ja"}]},
    {"id": "b", "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": []}]},
    {"id": "c", "messages": [{"role": "user", "content": "x"}]},
]


def lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows).encode()


def zstd(content: bytes) -> bytes:
    return bytes(pyarrow.compress(content, codec="zstd", asbytes=True))


def as_parquet(path: Path, rows: list[Any]) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


WRITERS: dict[str, Callable[[Path, list[Any]], Any]] = {
    "d.jsonl": lambda path, rows: path.write_bytes(lines(rows)),
    "bom.jsonl": lambda path, rows: path.write_bytes(b"\xef\xbb\xbf" + lines(rows)),
    "d.jsonl.gz": lambda path, rows: path.write_bytes(gzip.compress(lines(rows))),
    "d.jsonl.zst": lambda path, rows: path.write_bytes(zstd(lines(rows))),
    "two_frames.jsonl.zst": lambda path, rows: path.write_bytes(zstd(lines(rows[:1])) + zstd(lines(rows[1:]))),
    "d.json": lambda path, rows: path.write_text(json.dumps(rows, indent=1), encoding="utf-8"),
    "d.parquet": as_parquet,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_holds_the_same_rows(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name, ROWS)
    records, tally = read_path(tmp_path / name)
    said = [[m["content"] for m in r.messages] for r in records if isinstance(r, Conversation)]
    assert said == [["höflich\u2028", "ja"], ["q"], ["x"]] and [r.id for r in records] == ["a", "b", "c"]
    assert (tally.read, dict(tally.schemas)) == (3, {"messages": 3})
    assert tally.repaired == {"an empty turn: the conversation ends before it": 1}
    assert {r.category for r in records} == {name.split(".")[0]}


def test_a_file_of_many_schemas_and_faults_accounts_for_every_row(tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    path.write_bytes(
        lines([{"prompt": "q", "response": "a"}, {"conversations": [{"from": "human", "value": "q"}]}])
        + b'{"prompt": "broken\n\n'
        + b'{"prompt": "latin \xe9"}\n'
        + lines([{"foo": 1}, {"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"}])
        + lines([{"messages": [{"role": "elf", "content": "x"}]}])
        + b"[" * 100_000
        + b"\n"
        + b'{"prompt": "the last line, no newline"}'
    )
    records, tally = read_path(path)
    assert tally.read == 10 == len(records) + tally.refused.total()
    assert tally.schemas == {"prompt/response": 1, "ShareGPT": 1, "prompt": 3}
    assert tally.refused == {"not valid JSON": 2, "not UTF-8 text": 1, "unknown schema": 1, "unknown role 'elf'": 1}
    assert tally.examples["not valid JSON"][0][0] == "line 3"
    assert tally.examples["not UTF-8 text"] == [("line 5", "byte 0xe9 at position 18")]
    assert [r.id for r in records] == ["mixed-1", "mixed-2", "a", "a#8", "mixed-11"]
    assert "mended 1: an id that an earlier row has: its place is added (line 8)" in tally.lines()
    assert tally.lines()[0] == "10 rows read (3 prompt, 1 prompt/response, 1 ShareGPT)"


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("empty.jsonl", b"\n \n", "holds no row that can be used"),
        ("utf16.jsonl", "{}".encode("utf-16"), "UTF-16, not UTF-8 text. Convert it: iconv"),
        ("all_wrong.jsonl", lines([{"foo": 1}] * 5), r"refused 5: unknown schema \(line 1: .*keys with a value: foo"),
        ("cut.jsonl.gz", gzip.compress(lines(ROWS), mtime=0)[:-12], "cannot be read to its end"),
        ("cut.jsonl.zst", zstd(lines(ROWS))[:-12], "cannot be read to its end"),
        ("no.jsonl.zst", b"nothing of the kind", "cannot be read to its end"),
        ("no.parquet", b"nothing of the kind", "cannot be read to its end"),
        ("cut.json", b'[{"prompt": "x"}, ', "cannot be read to its end"),
        ("table.csv", b"prompt,answer\nx,y\n", r"not of a format that is read here: JSON lines \(.jsonl\)"),
        ("table.csv.gz", gzip.compress(b"\nprompt,answer\nx,y\n", mtime=0), "not of a format that is read here"),
        ("book.xlsx", b"PK\x03\x04\xff", "not of a format that is read here"),
    ],
)
def test_damage_to_a_whole_file(tmp_path: Path, name: str, content: bytes, complaint: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=complaint) as error:
        read_path(tmp_path / name)
    assert str(tmp_path / name) in str(error.value) and len(str(error.value).splitlines()) < 20


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "talks.jsonl").write_bytes(lines(ROWS))
    with pytest.raises(UserError, match=r"is a folder, not a file. Name a file in it: talks.jsonl"):
        read_path(tmp_path)
    with pytest.raises(UserError, match=r"does not exist. Did you mean .*talks.jsonl"):
        read_path(tmp_path / "talk.jsonl")


def test_json_lines_by_any_name_are_read(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_bytes(lines(ROWS) + b'{"broken\n')
    records, tally = read_path(tmp_path / "rows.txt")
    assert len(records) == 3 and tally.refused == {"not valid JSON": 1}


def test_a_limit_reads_no_further(tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl"
    path.write_bytes(lines([{"prompt": f"{i}"} for i in range(9)]) + b'{"broken')
    records, tally = read_path(path, limit=4)
    assert len(records) == tally.read == 4 and not tally.refused


def test_hub_datasets_stream(tmp_path: Path) -> None:
    """A folder of files goes the way of a hub id."""
    folder = tmp_path / "talk"
    folder.mkdir()
    as_parquet(folder / "train.parquet", [{**ROWS[0], "extra": None}, {**ROWS[2], "extra": "n"}])
    source = SourceConfig(kind="hub", path=str(folder))
    records, tally = read_source(source)
    assert [r.id for r in records] == ["a", "c"] and tally.schemas == {"messages": 2}
    assert isinstance(records[1], Conversation) and records[1].messages == ROWS[2]["messages"]
    assert len(read_source(SourceConfig(kind="hub", path=str(folder), rows=1))[0]) == 1
    stream = hub_rows(str(folder), "train")
    assert next(stream)[:2] == (0, "row 0")
    with pytest.raises(UserError, match=r"no column 'text'.*keys found: id, messages"):
        read_source(SourceConfig(kind="hub", path=str(folder), column="text"))
    for path, split in (("nobody/nothing-of-the-kind", "train"), (str(folder), "no_such_split")):
        with pytest.raises(UserError, match="cannot be loaded"):
            read_source(SourceConfig(kind="hub", path=path, split=split))
