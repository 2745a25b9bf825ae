"""Tables that expand, are damaged or hold bytes: one line, and text where it is text."""

import random
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from data_tools import corpus, preprocess
from data_tools.corpus import Reader
from data_tools.selection import Select
from megazero.base.errors import UserError


def write(path: Path, texts: object, **options: object) -> Path:
    table = pyarrow.table({"text": texts})
    given = {"compression": "zstd", "write_statistics": False, "store_schema": False, **options}
    pyarrow.parquet.write_table(table, path, **given)
    return path


def test_a_table_that_expands_to_more_than_text_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repeated = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 40, pyarrow.int32()), ["x" * 2**20])
    path = write(tmp_path / "x.parquet", repeated, dictionary_pagesize_limit=2**21)
    assert sum(len(piece.text) for piece in Reader([path])) == 40 * 2**20
    monkeypatch.setattr(corpus, "_SMALL_TABLE", 30 * 2**20)
    with pytest.raises(UserError, match=r"MZ-211 .*x.parquet: cannot be read: expands to more than 31,457,280 char"):
        list(Reader([path]))
    (tmp_path / "y.txt").write_text("y")
    reader = Reader([path, tmp_path / "y.txt"], skip_bad=True)
    assert [piece.text for piece in reader][-1] == "y" and reader.counts.rejected == 1


@pytest.mark.parametrize("kind", [pyarrow.binary(), pyarrow.large_binary(), pyarrow.binary_view()], ids=str)
@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_bytes_that_are_utf8_are_text(tmp_path: Path, kind: pyarrow.DataType, suffix: str) -> None:
    path, values = tmp_path / f"x{suffix}", ["one \u00e9".encode(), b"\xff", b"three"]
    table = pyarrow.table(
        {
            "text": pyarrow.array(values, kind),
            "meta": pyarrow.StructArray.from_arrays([pyarrow.array(values, kind)], ["body"]),
        }
    )
    if suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    for field in ("text", "meta.body"):
        select = Select((field,))
        reader = Reader([path], select, skip_bad=True)
        assert [piece.text for piece in reader] == ["one \u00e9", "three"]
        assert reader.counts.rejected == 1
        assert "row 2: cannot be read: 'utf-8' codec can't decode byte 0xff" in reader.counts.skipped[0]
        with pytest.raises(UserError, match=r"MZ-213 .*, row 2: cannot be read: 'utf-8' codec"):
            list(Reader([path], select))


def test_the_report_counts_what_was_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where nothing is left."""
    write(tmp_path / "x.parquet", pyarrow.array([b"one", b"\xff", b"\xfe"]))
    line = ["--skip-bad", "--tokenizer", "bytes", "--workers", "1", "--output", str(tmp_path / "out"), "--input"]
    assert preprocess.main([*line, str(tmp_path / "x.parquet")]) == 0
    assert "1 documents (0 empty ones skipped, 2 skipped as bad)" in capsys.readouterr().out
    write(tmp_path / "y.parquet", pyarrow.array([b"\xff", b"\xfe"]))
    assert preprocess.main([*line, str(tmp_path / "y.parquet")]) == 1
    said = capsys.readouterr().err
    assert "expected text, got 0 empty documents and 2 skipped as bad in 1 files" in said
    assert (tmp_path / "out.skipped.txt").read_text().count("y.parquet, row ") == 2


def test_damage_is_one_line_or_harmless(tmp_path: Path) -> None:
    """Single bytes of the pages and the end of a file, one after another."""
    path = write(tmp_path / "x.parquet", [f"text {i}" for i in range(50)], use_dictionary=False)
    good, rng, refusals = path.read_bytes(), random.Random(1), 0
    for _ in range(200):
        data = bytearray(good)
        data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data)
        try:
            for _ in Reader([path], skip_bad=True):
                pass
            list(Reader([path]))
        except UserError as error:
            refusals += 1
            assert error.code in (211, 213) and "\n" not in str(error)
    assert refusals > 20
