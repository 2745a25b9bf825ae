"""What preprocessing reads: compressed files, tables, fields inside fields; each fault is one line."""

import gzip
import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from data_tools import corpus, tables
from data_tools.corpus import Reader, find_files
from data_tools.places import Part
from data_tools.selection import Select
from megazero.base.errors import UserError

RECORDS = [
    {"text": f"text {i}\n" * (i + 1), "meta": {"lang": "en" if i % 2 else "de"}, "score": i / 10} for i in range(9)
]
TEXTS = [record["text"] for record in RECORDS]


def texts(reader: Reader) -> list[str]:
    found, parts = [], []
    for piece in reader:
        parts.append(piece.text)
        if piece.last:
            found.append("".join(parts))
            parts = []
    return found


def jsonl(records: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def write_parquet(path: Path, records: list[dict[str, Any]] = RECORDS) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path, row_group_size=4)
    return path


def write_arrow(path: Path, opened: Callable[..., Any]) -> Path:
    table = pyarrow.Table.from_pylist(RECORDS)
    with opened(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    return path


def every_kind(folder: Path) -> list[Path]:
    data = jsonl(RECORDS)
    (folder / "a.jsonl").write_bytes(data)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(data))
    half = len(data) // 2  # frames, end to end
    (folder / "c.jsonl.zst").write_bytes(zstandard.compress(data[:half]) + zstandard.compress(data[half:]))
    return [
        *(folder / name for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst")),
        write_parquet(folder / "d.parquet"),
        write_arrow(folder / "e.arrow", pyarrow.ipc.new_file),
        write_arrow(folder / "f.arrow", pyarrow.ipc.new_stream),
    ]


def test_every_kind_gives_the_same_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = every_kind(tmp_path)
    assert find_files([tmp_path]) == paths
    for rows in (tables._ROWS, 3):
        monkeypatch.setattr(tables, "_ROWS", rows)
        for path in paths:
            assert texts(Reader([path])) == TEXTS, path


def test_compressed_text_is_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "PIECE_BYTES", 100)
    text = "é line of text\n" * 1000
    (tmp_path / "x.txt.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "x.md.zst").write_bytes(zstandard.compress(text.encode()))
    for name in ("x.txt.gz", "x.md.zst"):
        for skip_bad in (False, True):
            assert texts(Reader([tmp_path / name], skip_bad=skip_bad)) == [text]


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("name", ["a.txt.gz", "b.jsonl.gz", "c.jsonl.zst", "d.parquet", "e.arrow", "f.arrow"])
@pytest.mark.parametrize("damage", ["cut off", "overwritten"])
def test_a_damaged_file_is_one_line(tmp_path: Path, name: str, damage: str, skip: bool) -> None:
    path = {p.name: p for p in every_kind(tmp_path)}.get(name, tmp_path / name)
    if name == "a.txt.gz":
        path.write_bytes(gzip.compress(jsonl(RECORDS)))
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3] if damage == "cut off" else b"\0\1\2\3" * (len(data) // 4))
    if skip:
        reader = Reader([path, tmp_path / "a.jsonl"], skip_bad=True)
        found = texts(reader)
        assert found[-9:] == TEXTS and found[:-9] == TEXTS[: len(found) - 9] and reader.counts.rejected == 1
        return
    with pytest.raises(UserError) as caught:
        texts(Reader([path]))
    assert caught.value.code == 211 and "\n" not in str(caught.value) and "cannot be read: " in str(caught.value)


def test_a_dense_file_costs_little_memory(tmp_path: Path) -> None:
    """A gigabyte of one line in a few kilobytes is refused by the length of its line, as it comes."""
    path = tmp_path / "x.jsonl.zst"
    with path.open("wb") as file, zstandard.ZstdCompressor().stream_writer(file) as writer:
        for _ in range(20):
            writer.write(b"x" * (1 << 20))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "LINE_BYTES", 1 << 20)
        with pytest.raises(UserError, match=r"MZ-213.*x.jsonl.zst:1: expected a line of at most 1,048,576 bytes"):
            texts(Reader([path]))


def test_text_under_a_path_and_of_several_fields(tmp_path: Path) -> None:
    records = [{"a": {"b": "one"}, "a.b": "exact", "title": "T"}, {"a": {"b": "two"}, "title": "U"}]
    (tmp_path / "x.jsonl").write_bytes(jsonl(records))
    assert texts(Reader([tmp_path / "x.jsonl"], Select(("a.b",)))) == ["exact", "two"]
    assert texts(Reader([tmp_path / "x.jsonl"], Select(("title", "a.b")))) == ["T\nexact", "U\ntwo"]
    with pytest.raises(UserError, match=r'MZ-213.*expected an object with text under "a.c", got keys a, a.b, title'):
        texts(Reader([tmp_path / "x.jsonl"], Select(("a.c",))))
    write_parquet(tmp_path / "x.parquet")
    with pytest.raises(UserError, match=r'MZ-213 .*x.parquet: expected a column "body", got text, meta, score'):
        texts(Reader([tmp_path / "x.parquet"], Select(("body",))))
    assert texts(Reader([tmp_path / "x.parquet"], Select(("meta.lang",)))) == [r["meta"]["lang"] for r in RECORDS]


@pytest.mark.parametrize(
    ("option", "given", "what"),
    [
        ("--part", "0/4", "expected K/N"),
        ("--part", "5/4", "expected K/N"),
        ("--part", "a", "expected K/N"),
    ],
)
def test_options_that_are_wrong(fails: Callable[..., str], option: str, given: str, what: str) -> None:
    assert what in fails(2, 190, "preprocess", "--input", ".", option, given, "--tokenizer", "bytes", "--output", "y")


@pytest.mark.parametrize("of", [1, 2, 3, 7, 40])
def test_parts_are_the_whole(tmp_path: Path, of: int) -> None:
    """Whatever is cut where: lines of JSON in the middle of a file, other files as a whole."""
    paths = every_kind(tmp_path)
    (tmp_path / "g.txt").write_text("a text\n")
    (tmp_path / "h.txt").write_text("")
    paths += [tmp_path / "g.txt", tmp_path / "h.txt"]
    found = [texts(Reader(paths, part=Part(number, of))) for number in range(1, of + 1)]
    assert list(chain.from_iterable(found)) == texts(Reader(paths))
    assert of == 1 or sum(map(bool, found)) > 1


def test_a_package_that_is_missing_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {path.suffix: path for path in every_kind(tmp_path)}
    monkeypatch.setattr("megazero.data.tokenizers.common.find_spec", lambda name: None)
    for suffix, package in ((".zst", "pyarrow"), (".parquet", "pyarrow"), (".arrow", "pyarrow")):
        with pytest.raises(UserError, match=f"MZ-162.*the package {package}, which is not installed"):
            texts(Reader([paths[suffix]]))
