"""Data sets of 10^9 documents and 10^13 tokens: sparse files, and arithmetic in place of files.

Figures are printed (`pytest -s`), never asserted; memory is.
"""

import os
import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from megazero.base.errors import UserError
from megazero.data import headerless, remembered
from megazero.data.choice import Everything, Side, mix
from megazero.data.data_file import DataFile
from megazero.data.document_offsets import DocumentOffsets
from megazero.data.documents import BLOCK, TokenStream, split_streams
from megazero.data.headerless import open_headerless
from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.joined import open_files
from megazero.data.remembered import Memory, identity_of
from megazero.data.sampler import placement, position_of, sample_id, window_of
from megazero.data.token_dataset import TokenDataset, TokenIds

REAL, LENGTH = 100_000, 10**8  # documents at the end of a sparse set, and their tokens: 10^13 in all
SIZES = [10**7, pytest.param(10**9, marks=pytest.mark.full)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/megazero/data"


def sparse(prefix: Path, documents: int) -> Path:
    """A data set whose first documents are empty, which is a hole in the index, and whose tokens are one, all 0."""
    sequences, first = documents + 1, documents + 1 - REAL  # as many of one as of the other would be one each
    lengths, pointers, indices = 34, 34 + 4 * sequences, 34 + 12 * sequences
    with Path(f"{prefix}.idx").open("wb") as file:
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 1, sequences, documents + 1))
        file.truncate(indices + 8 * (documents + 1))
        for at, values in (
            (lengths + 4 * first, np.full(REAL, LENGTH, "<i4")),
            (pointers + 8 * first, np.arange(REAL, dtype="<i8") * LENGTH),
            (indices + 8 * (documents - REAL), np.arange(first, sequences + 1, dtype="<i8")),
        ):
            file.seek(at)
            file.write(values.tobytes())
    with Path(f"{prefix}.bin").open("wb") as file:
        file.truncate(REAL * LENGTH)
    return prefix


class Arithmetic(DocumentOffsets):
    """Documents of 10,000 tokens, of which nothing is stored."""

    def __init__(self, documents: int):
        super().__init__(documents, documents * 10_000)

    def _read(self, first: int, stop: int) -> np.ndarray:
        return np.arange(first, stop) * 10_000

    def _refuse(self, what: str) -> UserError:
        raise AssertionError(what)


def arithmetic(tmp_path: Path, documents: int) -> TokenDataset:
    path = tmp_path / "tokens"
    with path.open("wb") as file:
        file.truncate(documents * 10_000)
    file = DataFile(path, "tokens", 204)
    return TokenDataset(path, file, np.dtype(np.uint8), Arithmetic(documents), memory=Memory(path, identity_of(file)))


class Measured:
    """The time and memory of what is done in it."""

    def __init__(self, what: str):
        self.what, self.peak = what, 0.0

    def __enter__(self) -> "Measured":
        tracemalloc.start()
        self.began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        seconds = time.perf_counter() - self.began
        self.peak = tracemalloc.get_traced_memory()[1] / 2**20
        tracemalloc.stop()
        print(f"\n{self.what}: {seconds:.4f} s, {self.peak:.1f} MiB", end="")


@pytest.mark.parametrize("documents", SIZES)
def test_a_sparse_index(tmp_path: Path, documents: int) -> None:
    prefix = sparse(tmp_path / "set", documents)
    with Measured(f"{documents:,} documents, first opening") as first:
        dataset = IndexedDataset(prefix)
    with Measured("later openings") as later:
        IndexedDataset(prefix)
    assert first.peak < 64 and later.peak < 4
    assert (dataset.num_documents, dataset.num_tokens) == (documents, 10**13)
    with Measured("locate"):
        found = [dataset.locate(token) for token in (0, LENGTH - 1, LENGTH, 10**13 - 1)]
    empty = documents - REAL
    assert found == [(empty, 0), (empty, LENGTH - 1), (empty + 1, 0), (documents - 1, LENGTH - 1)]
    with Measured("the stream of all, first") as first:
        stream = TokenStream(dataset, Everything())
    with Measured("the split, first") as split:
        train, valid = split_streams(dataset, 0.01)
    with Measured("the digest, first") as digest:
        told = train.digest()
    with Measured("split and digest, later") as later:
        again = split_streams(IndexedDataset(prefix), 0.01)[0]
        assert again.digest() == told
    assert max(each.peak for each in (first, split, digest, later)) < 64
    assert stream.num_tokens == 10**13 == train.num_tokens + valid.num_tokens
    chosen = Side(0.01, valid=True).numbers(empty, documents)
    assert valid.num_tokens == len(chosen) * LENGTH
    last = int(chosen[-1])
    assert valid.parts(valid.num_tokens - 5, valid.num_tokens) == [(last, LENGTH - 5, 5)]
    assert valid.span(last) == (valid.num_tokens - LENGTH, valid.num_tokens) and train.span(last) is None
    assert train.number(0) == 0 and train.span(0) is None, "empty"
    assert valid.before(last) == valid.num_tokens - LENGTH and valid.before(documents) == valid.num_tokens


@pytest.mark.parametrize("documents", [3 * 10**6, pytest.param(10**9, marks=pytest.mark.full)])
def test_a_stream_of_arithmetic(tmp_path: Path, documents: int) -> None:
    dataset = arithmetic(tmp_path, documents)
    with Measured(f"split of {documents:,} documents") as measured:
        train, valid = split_streams(dataset, 0.02)
    with Measured("again"):
        split_streams(dataset, 0.02)
    assert measured.peak < 64 and train.num_documents + valid.num_documents == documents
    draw = np.random.default_rng(0)
    for stream, is_valid in ((train, False), (valid, True)):
        assert stream.num_tokens == 10_000 * stream.num_documents
        for position in draw.integers(0, stream.num_tokens - 20_001, 50).tolist():
            parts = stream.parts(position, position + 20_000)
            assert sum(tokens for _, _, tokens in parts) == 20_000
            for document, _, _ in parts:
                low, high = np.uint64(document & 0xFFFFFFFF), np.uint64(document >> 32)
                hashed = int(mix(mix(np.array([low ^ np.uint64(0x9E3779B9)])) ^ high)[0])
                assert (hashed < round(0.02 * 2**32)) == is_valid
            document, offset, _ = parts[0]
            begin, end = stream.span(document) or (0, 0)
            assert begin + offset == position and end - begin == 10_000


@pytest.mark.parametrize("windows", [10**9, 10**13 // 4096, 10**13])
@pytest.mark.parametrize("seed", [0, 2**63 + 5])
def test_the_permutation_at_such_numbers(windows: int, seed: int) -> None:
    """Its inverse finds each sample again, so no two samples have one window; and it is no order of the file."""
    draw = np.random.default_rng(1)
    samples = draw.integers(0, 3 * windows, 2000)
    found = window_of(samples, windows, seed)
    assert (found >= 0).all() and (found < windows).all()
    for sample, window in zip(samples[:300].tolist(), found[:300].tolist(), strict=True):
        assert position_of(window, sample // windows, windows, seed) == sample
    assert abs(np.corrcoef(samples % windows, found)[0, 1]) < 0.1
    assert abs(found.mean() / windows - 0.5) < 0.05
    step = 10**13 // 4096
    assert sample_id(step, 7, 4096) == 4096 * step + 7
    assert placement(4095, 64, 16, 4) == (63, 15, 3)


def test_ends_of_a_large_file_of_ids_are_remembered(tmp_path: Path, monkeypatch, own_cache: Path) -> None:
    monkeypatch.setattr(headerless, "_LARGE", 1000)
    monkeypatch.setattr(headerless, "_BLOCK", 128)
    tokens = np.tile(np.array([1, 2, 3, 9], "<u2"), 500)
    tokens[-1] = 3
    (tmp_path / "x.npy").write_bytes(tokens.tobytes())
    ids = TokenIds(300, 9)
    for _ in range(2):
        dataset = open_headerless(tmp_path / "x.npy", ids)
        assert dataset.document_offsets[:].tolist() == [*range(0, 2000, 4), 2000]
        monkeypatch.setattr(headerless, "_ends", None)  # the second time nothing is looked for
    (data,) = own_cache.rglob("*.data")
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(own_cache.parent.parent))
    monkeypatch.setattr(headerless, "_LARGE", 1000)
    data.write_bytes(data.read_bytes()[:-8])  # what is kept is not believed
    assert open_headerless(tmp_path / "x.npy", ids).num_documents == 500


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something is remembered of any set."""
    for module in ("indexed_dataset", "datatrove", "joined"):
        monkeypatch.setattr(f"megazero.data.{module}.WORTH", 1)


def test_a_check_is_remembered_and_never_believed(make_dataset, small_memory, monkeypatch, own_cache: Path) -> None:
    prefix = make_dataset([[1, 2, 3], [4], [5, 6]]).prefix
    looked = []
    check = "megazero.data.indexed_dataset.check_index"
    monkeypatch.setattr(check, lambda index: looked.append(1))
    IndexedDataset(prefix)
    assert not looked, "it was checked when it was made"
    index = Path(f"{prefix}.idx")
    status = index.stat()

    def again() -> int:
        looked.clear()
        IndexedDataset(prefix)
        return len(looked)

    os.utime(index, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert (again(), again()) == (1, 0), "another time of change"
    index.write_bytes(content := index.read_bytes())
    os.utime(index, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert again() == 0, "the same bytes, time and inode"
    copy = index.with_suffix(".copy")
    copy.write_bytes(content)
    os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    copy.replace(index)
    assert (again(), again()) == (1, 0), "another inode"
    (record,) = own_cache.rglob("checked")
    record.chmod(0o666)
    assert again() == 1, "others may have written it"
    record.write_bytes(record.read_bytes() + b"x")
    assert again() == 1, "its hash is another"
    record.unlink()
    (record.parent / "theirs").write_bytes(b"")
    record.symlink_to(record.parent / "theirs")
    assert again() == 1, "a link"


def test_a_flipped_bit_of_a_sample_is_found_with_the_same_times(make_dataset, small_memory) -> None:
    prefix = make_dataset([[1, 2, 3], [4], [5, 6]]).prefix
    index = Path(f"{prefix}.idx")
    status = index.stat()
    with index.open("r+b") as file:
        file.seek(50)
        file.write(b"\x07")
    os.utime(index, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(UserError, match="MZ-203"):
        IndexedDataset(prefix)


def test_what_is_read_is_held_against_its_bounds(make_dataset, small_memory, monkeypatch) -> None:
    """Behind the check, of which only samples are looked at again."""
    monkeypatch.setattr("megazero.data.document_offsets.HELD", 0)
    dataset = make_dataset([[1, 2, 3], [4], [5, 6]])
    with dataset.idx_path.open("r+b") as file:
        file.seek(34 + 12 + 8)
        file.write(struct.pack("<q", 2**40))
    with pytest.raises(UserError, match=r"MZ-203 .* expected rising offsets of at most 6 tokens"):
        dataset.document_offsets[0:3]


@pytest.mark.parametrize("place", ["a file", "read-only"])
def test_without_a_cache_folder_everything_works(make_dataset, small_memory, monkeypatch, tmp_path, place: str) -> None:
    (tmp_path / "place").write_text("")
    home = "/proc" if place == "read-only" else str(tmp_path / "place")
    monkeypatch.setenv("XDG_CACHE_HOME", home)
    dataset = make_dataset([[1, 2, 3], [4], [5, 6]] * BLOCK)
    train, valid = split_streams(dataset, 0.3)
    assert train.num_documents + valid.num_documents == 3 * BLOCK and len(train.digest()) == 16
    assert Memory(dataset.bin_path, "x").recall("checked") is None


def test_records_of_others_are_not_read(make_dataset, small_memory, monkeypatch, own_cache: Path) -> None:
    dataset = make_dataset([[1, 2, 3]])
    assert dataset.memory is not None and dataset.memory.recall("checked") == b""
    monkeypatch.setattr(remembered, "is_private", lambda path: False)
    assert dataset.memory.recall("checked") is None


def test_shards_with_another_index_are_looked_through_again(make_dataset, small_memory, tmp_path: Path) -> None:
    """The tokens are the same files, and as many documents end elsewhere."""
    held_out = []
    for lengths in ([10, 30, 20, 40] * 3, [40, 20, 30, 10] * 3):
        prefix = make_dataset([[1] * length for length in lengths]).prefix
        (tmp_path / "web").mkdir(exist_ok=True)
        for suffix in ("idx", "bin") if not held_out else ("idx",):
            Path(f"{prefix}.{suffix}").replace(tmp_path / f"web/a.{suffix}")
        _, valid = split_streams(open_files(tmp_path / "web"), 0.4)
        assert valid.num_tokens == valid.lengths.sum()
        held_out.append(valid.num_tokens)
    assert held_out[0] != held_out[1]


def test_a_name_that_is_no_text_is_remembered_too(small_memory, tmp_path: Path, own_cache: Path) -> None:
    prefix = tmp_path / os.fsdecode(b"web/sh\xff.ds")
    prefix.parent.mkdir()
    prefix.write_bytes(struct.pack("<3H", 1, 2, 3))
    Path(f"{prefix}.index").write_bytes(struct.pack("<Q", 3))
    assert open_files(prefix.parent).num_tokens == 3 and [*own_cache.rglob("checked")]


def test_what_an_older_version_has_found_is_found_again(make_dataset, small_memory, monkeypatch) -> None:
    memory = make_dataset([[1, 2, 3]]).memory
    assert memory is not None and memory.recall("checked") == b""
    monkeypatch.setattr(remembered, "_VERSION", 0)
    assert memory.recall("checked") is None


def test_what_a_killed_writer_has_left_is_removed(tmp_path: Path) -> None:
    memory = Memory(tmp_path / "data", "as it is")
    memory.once("other", lambda: b"")
    left = [memory.path_of(f"{name}.tmp-0123") for name in ("checked[0]", "checked[0].data", "other")]
    for path in left:
        path.write_bytes(b"half")
    assert memory.once("checked[0]", lambda: b"found") == b"found"
    assert [path.exists() for path in left] == [False, False, True], "another record's may be written now"
