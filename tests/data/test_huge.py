"""Data sets of 10^9 documents and 10^13 tokens: sparse files, and arithmetic in place of files.

Figures are printed (`pytest -s`), never asserted; memory is.
"""

import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from megazero.data.choice import Side, mix
from megazero.data.documents import TokenStream, split_streams
from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.sampler import index_of, sample_id, window_of
from megazero.data.token_dataset import TokenDataset

REAL, LENGTH = 100_000, 10**8  # documents at the end of a sparse set, and their tokens: 10^13 in all
SIZES = [10**6, pytest.param(10**9, marks=pytest.mark.full)]


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


class Arithmetic(TokenDataset):
    """Documents of 10,000 tokens, all 0, of which nothing is stored."""

    def __init__(self, documents: int):
        self.prefix = self.bin_path = Path("arithmetic")
        self.dtype, self.num_documents, self.num_tokens = np.dtype(np.uint8), documents, documents * 10_000

    def read(self, start: int, stop: int) -> np.ndarray:
        return np.zeros(stop - start, np.uint8)

    def offsets(self, first: int, stop: int) -> np.ndarray:
        return np.arange(first, stop) * 10_000

    def scored(self, start: int, stop: int) -> np.ndarray:
        return np.ones(stop - start, bool)


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
def test_a_sparse_index(disk: Path, documents: int) -> None:
    prefix = sparse(disk / "set", documents)  # reading a hole of a file in memory fills it
    with Measured(f"{documents:,} documents, opened") as opened:
        dataset = IndexedDataset(prefix)
    assert opened.peak < 64
    assert (dataset.num_documents, dataset.num_tokens) == (documents, 10**13)
    with Measured("locate"):
        found = [dataset.locate(token) for token in (0, LENGTH - 1, LENGTH, 10**13 - 1)]
    empty = documents - REAL
    assert found == [(empty, 0), (empty, LENGTH - 1), (empty + 1, 0), (documents - 1, LENGTH - 1)]
    with Measured("the stream of all, first") as first:
        stream = TokenStream(dataset)
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
    assert train.placed(0)[0] == 0, "empty"


@pytest.mark.parametrize("documents", [10**6, pytest.param(10**9, marks=pytest.mark.full)])
def test_a_stream_of_arithmetic(documents: int) -> None:
    dataset = Arithmetic(documents)
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


@pytest.mark.parametrize("windows", [10**9, 10**13 // 4096, 10**13])
@pytest.mark.parametrize("seed", [0, 2**63 + 5])
def test_the_permutation_at_such_numbers(windows: int, seed: int) -> None:
    """No two samples of an epoch have one window, and it is no order of the file."""
    draw = np.random.default_rng(1)
    samples = draw.integers(0, 3 * windows, 2000)
    found = window_of(samples, windows, seed)
    assert (found >= 0).all() and (found < windows).all()
    pairs = {*zip((samples // windows).tolist(), found.tolist(), strict=True)}
    assert len(pairs) == len({*samples.tolist()})
    assert abs(np.corrcoef(samples % windows, found)[0, 1]) < 0.1
    assert abs(found.mean() / windows - 0.5) < 0.05
    step = 10**13 // 4096
    assert sample_id(step, 7, 4096) == 4096 * step + 7
    assert index_of(63, 15, 3, 64, 4) == 4095
