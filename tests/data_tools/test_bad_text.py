"""What is no text is refused before anything is lost, or skipped, counted and listed where that was asked for."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from data_tools import corpus, preprocess
from data_tools import counts as counts_module
from data_tools.corpus import Reader, find_files
from data_tools.counts import Counts
from data_tools.encoding import Encoder
from megazero.base.errors import UserError
from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.tokenizer import open_tokenizer
from tests.data_tools.conftest import REPOSITORY, Command

GOOD = "int value(void); /* é */\n" * 20


@pytest.fixture
def headers(tmp_path: Path) -> Path:
    """A folder of C: two headers and a source that are text, a header in Latin-1, and what is neither."""
    folder = tmp_path / "include"
    (folder / "sys").mkdir(parents=True)
    (folder / "a.h").write_text(GOOD)
    (folder / "sys/b.h").write_text(GOOD)
    (folder / "c.c").write_text(GOOD)
    (folder / "d.h").write_bytes(GOOD.encode() + b"caf\xe9\n" + GOOD.encode())
    (folder / "e.o").write_bytes(b"\xff\xfe")
    (folder / "f.txt").write_text("not asked for")
    return folder


def test_any_suffix_is_taken_and_replaces_the_others(headers: Path) -> None:
    assert [path.name for path in find_files([headers], [".h", ".c"])] == ["a.h", "c.c", "d.h", "b.h"]
    assert [path.name for path in find_files([headers])] == ["f.txt"]
    with pytest.raises(UserError, match=r"MZ-214 .*expected \.rs files, found none"):
        find_files([headers], [".rs"])


@pytest.mark.parametrize("given", ["h", ".", "", ".a/b", ". h"])
def test_a_suffix_that_is_none(fails: Callable[..., str], given: str) -> None:
    assert "expected a suffix such as .txt" in fails(
        2, 190, "preprocess", "--input", ".", "--suffix", given, "--tokenizer", "x", "--output", "y"
    )


def test_a_file_that_is_not_utf8_is_refused_before_any_work(
    headers: Path, model: Path, tmp_path: Path, fails: Callable[..., str]
) -> None:
    """Also where it is the last one, and the bytes are far behind its beginning."""
    (headers / "z.h").write_bytes(b"x" * (3 * corpus.PIECE_BYTES) + "é".encode()[:1])
    (headers / "d.h").unlink()
    line = fails(
        1, 212, "preprocess", "--input", headers, "--suffix", ".h", "--tokenizer", model, "--output", tmp_path / "out"
    )
    assert f"z.h: byte {3 * corpus.PIECE_BYTES:,} (0xc3) is not UTF-8" in line and "give --skip-bad" in line
    assert not list(tmp_path.glob("out*"))


def test_the_refusal_comes_before_the_workers(
    headers: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*arguments: object) -> None:
        raise AssertionError("work was begun")

    monkeypatch.setattr(Encoder, "encode", none)
    line = ["--input", str(headers), "--suffix", ".h", "--tokenizer", str(model), "--output", str(tmp_path / "out")]
    assert preprocess.main(line) == 1


def test_what_is_bad_is_skipped_counted_and_listed(
    headers: Path, model: Path, tmp_path: Path, command: Command
) -> None:
    out = tmp_path / "out"
    line = ["--input", headers, "--suffix", ".h", ".c", "--skip-bad", "--tokenizer", model, "--output", out]
    done = command("preprocess", *line)
    assert done.returncode == 0, done.stderr
    at = len(GOOD.encode()) + 3
    bad = f"{headers / 'd.h'}: byte {at} (0xe9) is not UTF-8: invalid continuation byte"
    assert done.stderr == f"skipped {bad}\nskipped 1 in all, which are listed in {out}.skipped.txt\n"
    assert (tmp_path / "out.skipped.txt").read_text() == f"{bad}\n"
    dataset = IndexedDataset(out)
    assert open_tokenizer(model).decode(dataset.read(0, dataset.num_tokens).tolist()) == 3 * GOOD, (
        "nothing of the bad one"
    )
    (headers / "d.h").unlink()
    for again in (line, [word for word in line if word != "--skip-bad"]):
        (tmp_path / "out.skipped.txt").write_text("of an earlier run")
        assert command("preprocess", *again).returncode == 0
        assert not (tmp_path / "out.skipped.txt").exists(), "the list of an earlier run would be wrong"


def test_a_vocabulary_skips_too(headers: Path, tmp_path: Path, command: Command) -> None:
    line = ["--input", headers, "--suffix", ".h", "--output", tmp_path / "m.model", "--vocab", 300]
    refused = command("train_tokenizer", *line)
    assert refused.returncode == 1 and refused.stderr.startswith("MZ-212") and "d.h: byte" in refused.stderr
    done = command("train_tokenizer", *line, "--skip-bad")
    assert done.returncode == 0 and "bytes (1 skipped as bad), " in done.stdout, done.stderr
    assert (tmp_path / "m.model.skipped.txt").read_text().count("\n") == 1


def test_lines_of_json_are_skipped_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "LINE_BYTES", 1000)
    path = tmp_path / "web.jsonl"
    good = [json.dumps({"text": text}).encode() for text in ("one", "two", "three", "four")]
    bad = [b"{", b'{"other": 1}', b'{"text": "\xe9"}', b'{"text": "' + b"x" * 5000 + b'"}']
    path.write_bytes(b"\n".join(line for pair in zip(good, bad, strict=True) for line in pair))
    reader = Reader([path], skip_bad=True)
    assert [piece.text for piece in reader] == ["one", "two", "three", "four"]
    assert reader.counts.rejected == 4
    assert [line.split(": ")[0] for line in reader.counts.skipped] == [f"{path}:{n}" for n in (2, 4, 6, 8)]
    with pytest.raises(UserError, match="MZ-213"):
        list(Reader([path]))


def test_the_list_of_what_was_skipped_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counts_module, "LISTED", 7)
    counts, said = Counts(), []
    for number in range(20):
        counts.skip(UserError(213, "bad", where=number))
    counts.list_skipped(tmp_path / "out", said.append)
    assert len(said) == 6 and "skipped 20 in all" in said[-1]
    assert (tmp_path / "out.skipped.txt").read_text().splitlines()[-1] == "... and 13 more"


def test_characters_cut_by_blocks_are_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("x" * (corpus.PIECE_BYTES - 1) + "é€𝄞" * 100_000)
    list(Reader([path]))
    assert "".join(piece.text for piece in Reader([path], skip_bad=True)) == path.read_text()


TRAIN = """
from data_tools.train_tokenizer import _train
print("begins", flush=True)
_train([f"{n * n:x} {n * 7919 % 10007:o}\\n" for n in range(400_000)], 9000)
"""


@pytest.mark.usefixtures("usual_signals")
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_a_signal_ends_a_vocabulary_that_is_being_trained(number: signal.Signals) -> None:
    """The library itself minds none."""
    line = [sys.executable, "-c", TRAIN]
    with subprocess.Popen(line, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "begins\n"
        time.sleep(1)
        assert process.poll() is None, "it ended before"
        process.send_signal(number)
        began = time.monotonic()
        process.communicate()
        assert time.monotonic() - began < 10, "a busy machine may take a few seconds; the library takes many more"
    assert process.returncode == -number
