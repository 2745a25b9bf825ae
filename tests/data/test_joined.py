"""A folder of shards as one data set."""

import os
import resource
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from megazero.base.errors import UserError
from megazero.data.documents import TokenStream
from megazero.data.indexed_dataset import IndexedDatasetWriter
from megazero.data.joined import JoinedDataset, open_files, shard_names
from tests.data.test_indexed_dataset import megatron_bytes
from tests.windows import open_datasets

FIRST = [[1, 2, 3], [4], [5, 6]]
SECOND = [[7, 8], [9, 10, 11, 12]]


def write(folder: Path, name: str, documents: list[list[int]], scored: list[int] | None = None) -> None:
    with IndexedDatasetWriter(folder / name, np.uint16, masked=scored is not None) as writer:
        writer.append(np.array([*chain(*documents)]), None if scored is None else np.array(scored, bool))
        for document in documents:
            writer.end_document(len(document))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two pairs, and files that are not whole yet."""
    folder = tmp_path / "shards"
    write(folder, "a", FIRST)
    write(folder, "b", SECOND)
    (folder / "c.bin").write_bytes(b"xx")  # its index comes later
    for name in (".e", "f.tmp", "a.idx.tmp-123", ""):
        (folder / f"{name}.bin").write_bytes(b"xx")
        (folder / f"{name}.idx").write_bytes(b"xx")
    return folder


def test_shards_are_one_data_set(folder: Path) -> None:
    assert shard_names(folder) == ["a", "b"]
    dataset = open_files(folder)
    assert isinstance(dataset, JoinedDataset) and (dataset.num_documents, dataset.num_tokens) == (5, 12)
    assert dataset.offsets(0, dataset.num_documents + 1).tolist() == [0, 3, 4, 6, 8, 12]
    assert dataset.offsets(1, 4).tolist() == [3, 4, 6]
    for start in range(13):
        for stop in range(start, 13):
            assert dataset.read(start, stop).tolist() == list(range(1, 13))[start:stop]
    assert [dataset.locate(token) for token in (0, 5, 6, 11)] == [(0, 0), (2, 1), (3, 0), (4, 3)]
    assert dataset.shard_of(4) == (dataset.shards[1], 1) and dataset.shard_of(2) == (dataset.shards[0], 2)
    windows, _ = open_datasets(folder, None, 5, 100, False)
    assert [windows.read(k).tokens.tolist() for k in range(2)] == [[1, 2, 3, 4, 5, 6], [6, 7, 8, 9, 10, 11]]


def test_an_id_that_is_too_large_is_named_in_its_shard(folder: Path) -> None:
    windows, _ = open_datasets(folder, None, 5, 12, False)
    with pytest.raises(UserError, match=r"MZ-205 .*b\.bin: token 3 of document 1 is 12"):
        windows.stream.read(6, 12), windows._read(6, 12)


def test_masks_of_some_shards(folder: Path) -> None:
    write(folder, "b", SECOND, [1, 0, 1, 0, 0, 1])
    assert open_files(folder).scored(4, 12).tolist() == [True, True, True, False, True, False, False, True]


def test_faults_are_one_line(folder: Path, tmp_path: Path) -> None:
    with IndexedDatasetWriter(folder / "z", np.int32) as writer:
        writer.append(np.array([1]))
        writer.end_document()
    with pytest.raises(UserError, match=r"MZ-228 .*z\.bin: stores int32, but a\.bin stores uint16"):
        open_files(folder)
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match=r"MZ-228 .*none: expected shards"):
        open_files(tmp_path / "none")


def test_more_shards_than_the_soft_limit_has_descriptors(tmp_path: Path) -> None:
    documents = [[[k % 1000, j] * (1 + (k + j) % 3) for j in range(3)] for k in range(300)]
    for k, each in enumerate(documents):
        (tmp_path / f"{k:04d}.bin").write_bytes(np.array([*chain(*each)], "<u2").tobytes())
        (tmp_path / f"{k:04d}.idx").write_bytes(megatron_bytes(8, [len(one) for one in each], 2, [0, 1, 2, 3]))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        dataset = open_files(tmp_path)
        everything = [token for each in documents for document in each for token in document]
        assert dataset.num_documents == 900 and dataset.read(0, dataset.num_tokens).tolist() == everything
        stream = TokenStream(dataset)
        draw = np.random.default_rng(0)
        for start in draw.integers(0, dataset.num_tokens - 50, 100).tolist():
            assert stream.read(start, start + 50)[0].tolist() == everything[start : start + 50]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_shard_that_is_cut_off(folder: Path) -> None:
    dataset = open_files(folder)
    os.truncate(folder / "b.bin", 4)
    with pytest.raises(UserError, match=r"MZ-204 .*b\.bin: was truncated after it was opened"):
        dataset.read(6, 12)
