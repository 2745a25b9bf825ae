"""The two commands that read data sets."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data_tools import inspect, merge
from data_tools.command import Parser, run
from megazero.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megazero.data.tokenizer import open_tokenizer
from tests.quiet import without_heartbeat


def write(prefix: Path, documents: list[list[int]], dtype: type[np.integer] = np.uint16) -> None:
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            writer.append(np.array(document))
            writer.end_document()


def test_inspect_json(command, tmp_path: Path):
    write(tmp_path / "x", [[5, 6, 2], [399, 2], [7, 8, 9, 10, 11, 12, 2]])
    result = command("inspect", "x", "--vocab", 400, "--json")
    assert result.returncode == 0 and result.stderr == ""
    assert json.loads(result.stdout) == {
        "prefix": "x",
        "dtype": "uint16",
        "documents": 3,
        "tokens": 12,
        "length_min": 2,
        "length_median": 3.0,
        "length_mean": 4.0,
        "length_max": 7,
        "id_min": 2,
        "id_max": 399,
        "scored": None,
        "vocab": 400,
    }


def test_inspect_shows_a_document(command, model: Path, tmp_path: Path):
    tokenizer = open_tokenizer(model)
    write(tmp_path / "x", [[2], [*tokenizer.encode("def f():\n    pass\n"), 2]])
    result = command("inspect", "x", "--tokenizer", model, "--document", 1)
    assert result.returncode == 0 and "text           def f():\n    pass\n</s>\n" in result.stdout
    assert (
        "vocab          400\n" in result.stdout and "scored         every token counts in the loss\n" in result.stdout
    )
    assert "special        </s> is 2, 2 times\nspecial        1 others, which do not occur\n" in result.stdout


def test_inspect_empty_data_set(command, tmp_path: Path):
    write(tmp_path / "x", [])
    result = command("inspect", "x")
    assert result.returncode == 0 and "length_max     -\n" in result.stdout and "tokens         0\n" in result.stdout


def test_inspect_finds_the_bad_id(fails, model: Path, tmp_path: Path):
    write(tmp_path / "x", [[1, 2], [3, 400, 2]])
    assert "token 1 of document 1 is 400, expected 0 <= id < 400" in fails(1, 205, "inspect", "x", "--vocab", 400)
    fails(1, 205, "inspect", "x", "--tokenizer", model)
    write(tmp_path / "negative", [[1, -2]], np.int32)
    assert "token 1 of document 0 is -2, expected 0 <= id;" in fails(1, 205, "inspect", "negative")


def test_inspect_scans_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(inspect, "BLOCK", 4)
    write(tmp_path / "x", [[9, 3, 4], [5, 6, 7, 8, 50], [1, 4]])
    assert inspect.main([str(tmp_path / "x"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["id_min"], report["id_max"]) == (1, 50)
    assert inspect.main([str(tmp_path / "x"), "--vocab", "50"]) == 1
    assert "token 4 of document 1 is 50" in capsys.readouterr().err


def test_inspect_usage(fails, model: Path, tmp_path: Path):
    write(tmp_path / "x", [[1]])
    fails(2, 190, "inspect", "x", "--document", 0)
    assert "documents 0 to 0" in fails(2, 190, "inspect", "x", "--document", 1, "--tokenizer", model)
    fails(2, 190, "inspect")
    fails(2, 190, "inspect", "")
    fails(1, 201, "inspect", "none")


def test_merge(command, tmp_path: Path):
    one, two = [[1, 2], [3]], [[4, 5, 6], [7]]
    write(tmp_path / "one", one)
    write(tmp_path / "two", two)
    result = command("merge", "one", "two", "one", "--output", "all")
    assert result.returncode == 0 and "6 documents, 10 tokens" in result.stdout and result.stderr == ""
    write(tmp_path / "expected", one + two + one)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"all{suffix}").read_bytes() == (tmp_path / f"expected{suffix}").read_bytes()


def test_merge_copies_block_by_block_and_may_replace_an_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(merge, "BLOCK", 3)
    write(tmp_path / "x", [list(range(10)), [1], [2, 3, 4]])
    assert merge.main([str(tmp_path / "x"), str(tmp_path / "x"), "--output", str(tmp_path / "x")]) == 0
    dataset = IndexedDataset(tmp_path / "x")
    assert dataset.read(0, dataset.num_tokens).tolist() == [*range(10), 1, 2, 3, 4] * 2
    assert dataset.offsets(0, dataset.num_documents + 1).tolist() == [0, 10, 11, 14, 24, 25, 28]


def test_merge_refuses(fails, tmp_path: Path):
    write(tmp_path / "short", [[1]])
    write(tmp_path / "long", [[1]], np.int32)
    write(tmp_path / "empty", [])
    assert "long: stores int32, but short stores uint16" in fails(1, 217, "merge", "short", "long", "--output", "x")
    fails(1, 214, "merge", "empty", "empty", "--output", "x")
    fails(1, 201, "merge", "short", "none", "--output", "x")
    fails(2, 190, "merge", "short")
    fails(2, 190, "merge", "short", "--output", "..")
    assert not list(tmp_path.glob("x*"))


@pytest.mark.parametrize(
    "name",
    ["inspect", *(pytest.param(name, marks=pytest.mark.full) for name in ("train_tokenizer", "preprocess", "merge"))],
)
def test_help_of_a_script(name: str):
    line = [sys.executable, Path(inspect.__file__).with_name(f"{name}.py"), "--help"]
    result = subprocess.run(line, capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout.startswith("usage: ")
    assert without_heartbeat(result.stderr) == ""


def test_output_that_cannot_be_written_is_one_line(tmp_path: Path):
    """/dev/full for a full disk, a closed pipe for `| head`."""
    write(tmp_path / "x", [[1]])
    line = [sys.executable, Path(inspect.__file__), tmp_path / "x"]
    with open("/dev/full", "w") as full:
        result = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True)
    said = without_heartbeat(result.stderr)
    assert result.returncode == 1 and said.startswith("MZ-405: standard output: ") and said.count("\n") == 1
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.close()
        assert without_heartbeat(child.stderr.read()) == ""
    assert child.returncode == 0


def test_interrupt_is_one_line(capsys):
    def interrupted(_) -> None:
        raise KeyboardInterrupt

    assert run(interrupted, Parser(prog="x.py"), []) == 130
    assert capsys.readouterr().err == "x.py: interrupted, no partial file is left\n"
