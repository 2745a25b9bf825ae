"""A folder of shards as one data set."""

import os
import resource
import struct
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from megazero.base.errors import UserError
from megazero.data.choice import Everything
from megazero.data.documents import TokenStream, split_streams
from megazero.data.indexed_dataset import IndexedDatasetWriter
from megazero.data.joined import JoinedDataset, describe, open_files, shard_names
from megazero.data.windows import open_datasets

FIRST = [[1, 2, 3], [4], [5, 6]]
SECOND = [[7, 8], [9, 10, 11, 12]]


def write(folder: Path, name: str, documents: list[list[int]]) -> None:
    with IndexedDatasetWriter(folder / name, np.uint16) as writer:
        for document in documents:
            writer.append(np.array(document))
            writer.end_document()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A pair, datatrove's files, and what is not whole yet."""
    folder = tmp_path / "shards"
    write(folder, "a", FIRST)
    (folder / "b.ds").write_bytes(struct.pack("<6H", *chain(*SECOND)))
    (folder / "b.ds.index").write_bytes(struct.pack("<2Q", 2, 6))
    (folder / "c.bin").write_bytes(b"xx")  # its index comes later
    (folder / "d.ds").write_bytes(b"xx")
    for name in (".e", "f.tmp", "a.idx.tmp-123", ""):
        (folder / f"{name}.bin").write_bytes(b"xx")
        (folder / f"{name}.idx").write_bytes(b"xx")
    return folder


def test_shards_are_one_data_set(folder: Path) -> None:
    assert shard_names(folder) == ["a", "b.ds"]
    dataset = open_files(folder)
    assert isinstance(dataset, JoinedDataset) and (dataset.num_documents, dataset.num_tokens) == (5, 12)
    assert dataset.document_offsets[:].tolist() == [0, 3, 4, 6, 8, 12]
    for start in range(13):
        for stop in range(start, 13):
            assert dataset.read(start, stop).tolist() == list(range(1, 13))[start:stop]
    assert [dataset.locate(token) for token in (0, 5, 6, 11)] == [(0, 0), (2, 1), (3, 0), (4, 3)]
    assert dataset.place_of(4) == (folder / "b.ds", 1) and dataset.shard_of(2) == "a"
    assert [dataset.document_of(*each) for each in (("b.ds", 1), ("b.ds", 2), ("c", 0))] == [4, None, None]
    windows, _ = open_datasets(folder, None, 5, 100, False)
    assert [windows.read(k).tokens.tolist() for k in range(2)] == [[1, 2, 3, 4, 5, 6], [6, 7, 8, 9, 10, 11]]


def test_an_id_that_is_too_large_is_named_in_its_shard(folder: Path) -> None:
    windows, _ = open_datasets(folder, None, 5, 12, False)
    with pytest.raises(UserError, match=r"MZ-205 .*b\.ds: token 3 of document 1 is 12"):
        windows.stream.read(6, 12), windows._read(6, 12)


def test_masks_of_some_shards(folder: Path) -> None:
    (folder / "b.ds.loss").write_bytes(bytes([1, 0, 1, 0, 0, 1]))
    mask = open_files(folder).mask
    assert mask is not None
    assert mask.read(4, 12).tolist() == [True, True, True, False, True, False, False, True]


def test_shards_behind_the_others_move_none(folder: Path) -> None:
    """What was chosen stays chosen, and keeps its place in the stream."""
    shards = describe(folder, shard_names(folder), lambda error: None)
    write(folder, "0", [[50] * 4] * 40)
    new = describe(folder, ["0"], lambda error: None)
    for before, after in zip(
        split_streams(JoinedDataset(folder, shards), 0.4),
        split_streams(JoinedDataset(folder, [*shards, *new]), 0.4),
        strict=True,
    ):
        assert after.num_tokens > before.num_tokens == after.before(5)
        assert np.array_equal(before.read(0, before.num_tokens)[0], after.read(0, before.num_tokens)[0])


def test_faults_are_one_line(folder: Path, tmp_path: Path) -> None:
    shards = describe(folder, shard_names(folder), lambda error: None)
    write(folder, "a", [[3, 2, 1], [4], [5, 6]])
    with pytest.raises(
        UserError, match=r"MZ-228 .*/a: .*has changed: expected 3 documents, 6 tokens, xxh3 \w+, got 3, 6, "
    ):
        JoinedDataset(folder, shards)
    (folder / "b.ds.index").unlink()
    with pytest.raises(UserError, match=r"MZ-228 .*/b\.ds: .* is gone"):
        JoinedDataset(folder, shards[1:])
    with IndexedDatasetWriter(folder / "z", np.int32) as writer:
        writer.append(np.array([1]))
        writer.end_document()
    with pytest.raises(UserError, match=r"MZ-228 .*z\.bin: stores int32, but a\.bin stores uint16"):
        open_files(folder)
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match=r"MZ-228 .*none: expected shards"):
        open_files(tmp_path / "none")


def test_two_thousand_shards_with_few_descriptors(tmp_path: Path) -> None:
    documents = [[[k % 1000, j] * (1 + (k + j) % 3) for j in range(3)] for k in range(2000)]
    for k, each in enumerate(documents):
        tokens, ends = list(chain(*each)), np.cumsum([len(document) for document in each])
        (tmp_path / f"{k:04d}.ds").write_bytes(np.array(tokens, "<u2").tobytes())
        (tmp_path / f"{k:04d}.ds.index").write_bytes(ends.astype("<u8").tobytes())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        dataset = open_files(tmp_path)
        everything = [token for each in documents for document in each for token in document]
        assert dataset.num_documents == 6000 and dataset.read(0, dataset.num_tokens).tolist() == everything
        stream = TokenStream(dataset, Everything())
        draw = np.random.default_rng(0)
        for start in draw.integers(0, dataset.num_tokens - 50, 500).tolist():
            assert stream.read(start, start + 50)[0].tolist() == everything[start : start + 50]
        path = tmp_path / "0007.ds"
        path.unlink()
        path.write_bytes(bytes(2 * len(list(chain(*documents[7])))))
        begin = dataset.document_offsets[21]
        with pytest.raises(UserError, match=r"MZ-204 .*0007\.ds: was replaced since it was opened"):
            dataset.read(begin, begin + 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_many_folders_share_the_descriptors(tmp_path: Path) -> None:
    for k in range(240):
        (tmp_path / f"{k % 6}").mkdir(exist_ok=True)
        (tmp_path / f"{k % 6}/{k}.ds").write_bytes(struct.pack("<3H", k, k, k))
        (tmp_path / f"{k % 6}/{k}.ds.index").write_bytes(struct.pack("<Q", 3))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        for dataset in [open_files(tmp_path / str(k)) for k in range(6)]:
            assert dataset.num_tokens == len(dataset.read(0, dataset.num_tokens)) == 120
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_shard_that_is_cut_off_and_taken_away(folder: Path) -> None:
    dataset = open_files(folder)
    dataset.read(6, 12)
    os.truncate(folder / "b.ds", 4)
    (folder / "b.ds").unlink()
    with pytest.raises(UserError, match=r"MZ-204 .*b\.ds: was truncated since it was opened"):
        dataset.read(6, 12)
