"""Reading text: nothing lost at the cuts, and every fault with its place."""

import codecs
import gzip
import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_tools import corpus
from data_tools.corpus import Reader, find_files
from megazero.base.errors import UserError

LETTERS = st.sampled_from(["a", "é", "中", "😀", "\n", "\r\n", "\n\n", "\u2581", "\0", " "])
TEXTS = st.lists(LETTERS, max_size=60).map("".join)
REUSE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> int:
    """Blocks of 16 bytes; returns how many characters a piece has at most, once there is no newline for 24."""
    monkeypatch.setattr(corpus, "PIECE_BYTES", 16)
    monkeypatch.setattr(corpus, "WHOLE", 24)
    return 24 + 16


def documents(files: list[Path]) -> list[str]:
    result, parts = [], []
    for piece in Reader(files):
        parts.append(piece.text)
        if piece.last:
            result.append("".join(parts))
            parts = []
    assert not parts
    return result


@given(st.lists(TEXTS, min_size=1, max_size=4))
@REUSE
def test_text_files_come_whole_in_small_pieces(tmp_path: Path, small_pieces: int, texts: list[str]):
    files = [tmp_path / f"{i}.txt" for i in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_bytes(text.encode())
    assert documents(files) == texts
    for file, text in zip(files, texts, strict=True):
        reader = Reader([file])
        pieces = list(reader)
        assert all(len(piece.text) <= small_pieces for piece in pieces)
        assert reader.bytes_read == len(text.encode())
        assert all(a.cut != a.text.endswith("\n") for a, b in pairwise(pieces))
        assert all(8 < len(a.text) <= 24 and "\n" not in a.text for a in pieces if a.cut)


@given(st.lists(TEXTS, min_size=1, max_size=4), st.booleans())
@REUSE
def test_json_lines_come_whole_in_small_pieces(tmp_path: Path, small_pieces: int, texts: list[str], ascii_only: bool):
    lines = [json.dumps({"id": 1, "text": text}, ensure_ascii=ascii_only) for text in texts]
    (tmp_path / "x.jsonl").write_bytes("\n\n".join(lines).encode())
    assert documents([tmp_path / "x.jsonl"]) == texts
    assert all(len(piece.text) <= small_pieces for piece in Reader([tmp_path / "x.jsonl"]))


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("name", ["x.txt", "x.md", "x.h", "x.txt.gz", "x.jsonl", "x.jsonl.gz"])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, name: str, skip: bool):
    """It is dropped at the beginning of a file, once, and nowhere else."""
    text = "\ufeffa\ufeff"
    content = json.dumps({"text": text}, ensure_ascii=False) if "jsonl" in name else text
    data = codecs.BOM_UTF8 + content.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    reader = Reader([tmp_path / name], skip_bad=skip, known=set() if skip else None)
    assert [piece.text for piece in reader] == [text]


def test_the_place_of_bad_utf8_counts_the_byte_order_mark(tmp_path: Path):
    for name, before in (("x.txt", b""), ("x.jsonl", b'{"text": "')):
        (tmp_path / name).write_bytes(codecs.BOM_UTF8 + before + b"a\xff")
        with pytest.raises(UserError, match=rf"MZ-212 .*byte {4 + len(before)} \(0xff\)"):
            documents([tmp_path / name])


def test_folders_are_sorted_and_searched_for_text(tmp_path: Path):
    for name in ("b.txt", "a/z.py", "a/b/c.md", "c.jsonl", "d.bin", "e.txt.gz", "a/ü ñ.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "a/loop").symlink_to(tmp_path)
    found = [path.relative_to(tmp_path).as_posix() for path in find_files([tmp_path])]
    assert found == ["a/b/c.md", "a/z.py", "a/ü ñ.txt", "b.txt", "c.jsonl", "e.txt.gz"]
    assert find_files([tmp_path / "d.bin", tmp_path / "b.txt"]) == [tmp_path / "d.bin", tmp_path / "b.txt"]


@pytest.mark.parametrize("before", [0, 5, 15, 16, 17, 100])
@pytest.mark.parametrize("bad", [b"\xff", b"\x80", b"\xc3(", b"\xed\xa0\x80", b"\xf0\x9f\x98", b"\x80" * 9])
def test_bad_utf8_names_the_byte(tmp_path: Path, small_pieces: int, before: int, bad: bytes):
    (tmp_path / "x.txt").write_bytes(b"a" * before + bad)
    with pytest.raises(UserError, match=rf"MZ-212 .*x\.txt: byte {before} \(0x{bad[0]:02x}\)"):
        documents([tmp_path / "x.txt"])


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        (b"{", 213, "not JSON: Expecting property name"),
        (b'{"text": "a"} x', 213, "Extra data"),
        (b'["text"]', 213, 'text under "text", got list'),
        (b'{"body": "a"}', 213, "got keys body"),
        (b'{"text": null}', 213, "got NoneType there"),
        (b'{"text": 5}', 213, "got int there"),
        (b'{"text": "\\ud800"}', 213, "character 0 of the text is half a surrogate pair"),
        (b"[" * 100_000, 213, "recursion"),
        (b'{"text": ' + b"1" * 5000 + b"}", 213, "not JSON: Exceeds the limit"),
        (b'{"text": "\xff"}', 212, "byte 27 (0xff)"),
    ],
)
def test_bad_json_lines_name_file_and_line(tmp_path: Path, line: bytes, code: int, message: str):
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(UserError) as caught:
        documents([tmp_path / "x.jsonl"])
    assert caught.value.code == code and message in str(caught.value)
    assert code == 212 or "x.jsonl:2:" in str(caught.value)


def test_line_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(corpus, "LINE_BYTES", 20)
    (tmp_path / "x.jsonl").write_text('{"text": "1234567"}\n{"text": "12345678901"}\n')
    with pytest.raises(UserError, match=r"MZ-213 .*x\.jsonl:2: expected a line of at most 20 bytes"):
        documents([tmp_path / "x.jsonl"])


def test_nothing_to_read(tmp_path: Path):
    with pytest.raises(UserError, match=r"MZ-211 .*none: no such file"):
        find_files([tmp_path / "none"])
    with pytest.raises(UserError, match=r"MZ-214 .*found none"):
        find_files([tmp_path])
