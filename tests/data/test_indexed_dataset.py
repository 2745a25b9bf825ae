"""The .bin/.idx pair: bytes on disk, round trips, and every way of being damaged that we could think of."""

import os
import resource
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megazero.base.errors import UserError
from megazero.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from tests.processes import until

DOCUMENTS = [[1, 2, 3], [4], [5, 6, 7, 8, 65535]]


def refusal(prefix: Path) -> UserError:
    with pytest.raises(UserError) as caught:
        IndexedDataset(prefix)
    assert len(str(caught.value)) <= 300 and "\n" not in str(caught.value)
    return caught.value


def megatron_bytes(code: int, lengths: list[int], itemsize: int, documents: list[int]) -> bytes:
    """An index as Megatron-LM writes it, put together by hand."""
    pointers = [sum(lengths[:i]) * itemsize for i in range(len(lengths))]
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(documents))
    arrays = struct.pack(f"<{len(lengths)}i{len(lengths)}q{len(documents)}q", *lengths, *pointers, *documents)
    return header + arrays


def test_bytes_on_disk_are_megatrons(make_dataset, tmp_path: Path):
    make_dataset(DOCUMENTS)
    assert (tmp_path / "set.bin").read_bytes() == struct.pack("<9H", *[1, 2, 3, 4, 5, 6, 7, 8, 65535])
    assert (tmp_path / "set.idx").read_bytes() == megatron_bytes(8, [3, 1, 5], 2, [0, 1, 2, 3])


def test_reads_what_megatron_writes(tmp_path: Path):
    """Documents of several sequences, an empty document, another integer type."""
    (tmp_path / "set.idx").write_bytes(megatron_bytes(4, [2, 1, 2, 1, 1], 4, [0, 2, 2, 4, 5]))
    (tmp_path / "set.bin").write_bytes(struct.pack("<7i", *range(7)))
    dataset = IndexedDataset(tmp_path / "set")
    assert dataset.offsets(0, dataset.num_documents + 1).tolist() == [0, 3, 3, 6, 7]
    assert dataset.read(0, 7).tolist() == list(range(7)) and dataset.dtype == np.int32
    assert [dataset.locate(i) for i in (0, 2, 3, 6)] == [(0, 0), (0, 2), (2, 0), (3, 0)]


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16])
def test_round_trip(make_dataset, dtype):
    documents = [[0, 1], [np.iinfo(dtype).max], [5] * 100]
    dataset = make_dataset(documents, dtype)
    assert (dataset.num_documents, dataset.num_tokens, dataset.dtype) == (3, 103, dtype)
    assert [dataset.read(*dataset.bounds(d)).tolist() for d in range(3)] == documents


def test_no_documents(make_dataset):
    dataset = make_dataset([])
    assert (dataset.num_documents, dataset.num_tokens, len(dataset.read(0, 0))) == (0, 0, 0)


def test_ids_that_do_not_fit_are_never_wrapped(tmp_path: Path):
    with pytest.raises(AssertionError, match="do not fit uint16"), IndexedDatasetWriter(tmp_path / "x", np.uint16) as w:
        w.append(np.array([65536]))
    assert list(tmp_path.iterdir()) == []


def test_document_longer_than_a_sequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("megazero.data.indexed_dataset.MAX_SEQUENCE", 4)
    with IndexedDatasetWriter(tmp_path / "x", np.int32) as writer:
        for part in (np.arange(3), np.arange(3, 10)):
            writer.append(part)
        writer.end_document()
        writer.append(np.arange(4))
        writer.end_document()
    assert (tmp_path / "x.idx").read_bytes() == megatron_bytes(4, [4, 4, 2, 4], 4, [0, 3, 4])
    assert IndexedDataset(tmp_path / "x").offsets(0, 3).tolist() == [0, 10, 14]


@pytest.mark.parametrize("cut", [1, 2, 17, 18])
def test_truncated_bin(make_dataset, tmp_path: Path, cut: int):
    make_dataset(DOCUMENTS)
    os.truncate(tmp_path / "set.bin", 18 - cut)
    error = refusal(tmp_path / "set")
    assert error.code == 204 and f"expected 18 bytes (9 uint16 tokens), got {18 - cut}" in str(error)


def test_bin_of_odd_size(make_dataset, tmp_path: Path):
    make_dataset(DOCUMENTS)
    with (tmp_path / "set.bin").open("ab") as file:
        file.write(b"x")
    assert refusal(tmp_path / "set").code == 204


def test_index_truncated_anywhere(make_dataset, tmp_path: Path):
    make_dataset(DOCUMENTS)
    content = (tmp_path / "set.idx").read_bytes()
    for size in range(len(content)):
        (tmp_path / "set.idx").write_bytes(content[:size])
        assert refusal(tmp_path / "set").code == 202


def test_every_flipped_bit_of_an_index_is_refused(make_dataset, tmp_path: Path):
    make_dataset(DOCUMENTS)
    content = (tmp_path / "set.idx").read_bytes()
    for bit in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        (tmp_path / "set.idx").write_bytes(damaged)
        assert refusal(tmp_path / "set").code in (202, 203, 204), bit


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        (b"PK\x03\x04" + bytes(60), 202, "expected magic"),
        (megatron_bytes(7, [9], 4, [0, 1]), 202, "code of an integer type, got"),
        (b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 2, 8, 0, 1), 202, "version 1 and the code of an integer type, got"),
        (b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 2**60, 2**60), 202, "1,152,921,504,606,846,976 sequences"),
        (megatron_bytes(8, [-9], 2, [0, 1]), 203, "got byte 0 and -9 tokens"),
        (megatron_bytes(8, [9], 2, [0, 2]), 203, "from 0 to 1, got 0 to 2"),
        (megatron_bytes(8, [9], 2, []), 203, "got none"),
        (megatron_bytes(8, [3, 3, 3], 2, [0, 2, 1, 3]), 203, "expected one sequence in document 0, got 2 from 0 on"),
        (megatron_bytes(8, [3, 3, 3], 2, [0, 1, 1, 3]), 203, "expected one sequence in document 1, got 0 from 1 on"),
        (
            megatron_bytes(8, [3, 6], 4, [0, 1, 2]),
            203,
            "expected sequence 1 at byte 6 with 0 or more tokens, got byte 12",
        ),
        (megatron_bytes(8, [3, 60], 2, [0, 1, 2]), 204, "expected 126 bytes"),
    ],
)
def test_damaged_index(make_dataset, tmp_path: Path, content: bytes, code: int, message: str):
    make_dataset(DOCUMENTS)
    (tmp_path / "set.idx").write_bytes(content)
    error = refusal(tmp_path / "set")
    assert error.code == code and message in str(error) and str(tmp_path) in str(error)


def test_missing_files_name_the_command(tmp_path: Path):
    assert "`megazero preprocess " in str(refusal(tmp_path / "train"))
    assert "`make data`" in str(refusal(tmp_path / "data/quickstart/train"))
    assert "without .bin" in str(refusal(tmp_path / "train.bin"))
    (tmp_path / "train.idx").write_bytes(megatron_bytes(8, [1], 2, [0, 1]))
    assert "train.bin" in str(refusal(tmp_path / "train"))


def test_exception_leaves_the_old_pair(make_dataset, tmp_path: Path):
    make_dataset(DOCUMENTS)
    with pytest.raises(KeyError), IndexedDatasetWriter(tmp_path / "set", np.uint16) as writer:
        writer.append(np.arange(100))
        raise KeyError
    assert IndexedDataset(tmp_path / "set").num_tokens == 9
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set.bin", "set.idx"]


def test_open_reader_keeps_the_old_tokens(make_dataset):
    old = make_dataset(DOCUMENTS)
    new = make_dataset([[9] * 50])
    assert old.read(0, 9).tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 65535] and new.read(0, 50).tolist() == [9] * 50


WRITE_FOR_EVER = """
import sys, numpy as np
from megazero.data.indexed_dataset import IndexedDatasetWriter
with IndexedDatasetWriter(sys.argv[1], np.uint16) as writer:
    print("writing", flush=True)
    for _ in range(int(sys.argv[2])):
        writer.append(np.arange(10_000)); writer.end_document()
"""


def test_sigkill_leaves_nothing_a_reader_accepts(tmp_path: Path):
    with subprocess.Popen(
        [sys.executable, "-c", WRITE_FOR_EVER, tmp_path / "set", "1000000000"], stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None and child.stdout.readline()
        until(lambda: any(path.stat().st_size for path in tmp_path.iterdir()))
        child.send_signal(signal.SIGKILL)
    assert refusal(tmp_path / "set").code == 201


def test_refused_write_is_one_line_and_cleans_up(make_dataset, tmp_path: Path):
    """The operating system itself refuses: a limit on the size of files, in a child process."""
    make_dataset(DOCUMENTS)
    child = subprocess.run(
        [sys.executable, "-c", WRITE_FOR_EVER, tmp_path / "set", "1000"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
        capture_output=True,
        text=True,
    )
    assert "MZ-208" in child.stderr.splitlines()[-1] and "File too large" in child.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set.bin", "set.idx"]
    assert IndexedDataset(tmp_path / "set").num_tokens == 9


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """/dev/full answers every write with ENOSPC; the writer's temporary file is pointed at it."""
    monkeypatch.setattr(
        "megazero.data.indexed_dataset.temporary_name", lambda path: path.with_name(f"{path.name}.temporary")
    )
    with pytest.raises(UserError, match=r"MZ-208.*No space left on device") as caught:
        full = IndexedDatasetWriter(tmp_path / "set", np.uint16)
        with full as writer:
            descriptor = os.open("/dev/full", os.O_WRONLY)
            os.dup2(descriptor, writer._file.fileno())
            os.close(descriptor)
            for _ in range(100):
                writer.append(np.arange(10_000))
                writer.end_document()
    assert caught.value.exit_code == 1 and list(tmp_path.iterdir()) == []


def test_place_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="MZ-208"), IndexedDatasetWriter(tmp_path / "file/set", np.uint16):
        pass


def test_a_file_that_is_truncated_while_it_is_open_is_named(make_dataset) -> None:
    """Were it mapped, the process would end by SIGBUS."""
    dataset = make_dataset([list(range(100))], np.uint16)
    os.truncate(dataset.bin_path, 101)
    assert dataset.read(0, 50).tolist() == list(range(50))
    with pytest.raises(
        UserError, match=r"MZ-204 .*\.bin: was truncated .*: it ends at byte 101, expected tokens at byte 101"
    ):
        dataset.read(40, 60)


def test_a_file_that_is_replaced_or_deleted_while_it_is_open_is_still_read(make_dataset) -> None:
    dataset = make_dataset([list(range(100))], np.uint16)
    dataset.bin_path.unlink()
    assert dataset.read(90, 100).tolist() == list(range(90, 100))


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
@pytest.mark.parametrize("kind", ["FIFO", "folder", "device"])
def test_what_is_no_regular_file_is_refused(make_dataset, suffix: str, kind: str) -> None:
    prefix = make_dataset([[1, 2]]).prefix
    path = Path(f"{prefix}{suffix}")
    path.unlink()
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(
        UserError, match=rf"MZ-201 .*{path.name}: cannot be read: expected a regular file, got a {kind}"
    ):
        IndexedDataset(prefix)
