"""Masks: what is written is read, whatever is wrong with one is said, and only what it says counts in the loss."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megazero.base.errors import UserError
from megazero.data.documents import TokenStream
from megazero.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megazero.data.loss_mask import LossMask, LossMaskWriter, mask_path
from megazero.data.origin import Origin, read_origin, require_mask
from megazero.data.windows import WindowDataset
from tests.chosen import Chosen

HEADER = 24


def write_mask(path: Path, scored: np.ndarray, parts: tuple[int, ...] = ()) -> str:
    with path.open("wb") as file:
        writer = LossMaskWriter(file)
        for part in np.split(scored, [place for place in sorted(parts) if place <= len(scored)]):
            writer.append(part)
        return writer.finish()


def write(prefix: Path, lengths: list[int], scored: np.ndarray | None) -> IndexedDataset:
    """Documents of these lengths, whose ids count up from 0, with a mask."""
    with IndexedDatasetWriter(prefix, np.uint16, masked=scored is not None) as writer:
        writer.append(np.arange(sum(lengths)), scored)
        for length in lengths:
            writer.end_document(length)
    return IndexedDataset(prefix)


@given(st.lists(st.booleans(), max_size=70), st.lists(st.integers(0, 70), max_size=4).map(tuple))
def test_bits_are_where_the_format_says(tmp_path_factory: pytest.TempPathFactory, bits: list[bool], parts) -> None:
    path = tmp_path_factory.mktemp("mask") / "x.mask"
    digest = write_mask(path, np.array(bits, bool), parts)
    content = path.read_bytes()
    assert content[:8] == b"MZMASK\0\1" and int.from_bytes(content[8:16], "little") == len(bits)
    assert len(content) == HEADER + (len(bits) + 7) // 8
    found = [bool(content[HEADER + i // 8] >> i % 8 & 1) for i in range(8 * (len(content) - HEADER))]
    assert found == bits + [False] * (len(found) - len(bits))
    mask = LossMask(path, len(bits))
    assert mask.digest == digest
    for start in range(0, len(bits) + 1, 3):
        for stop in range(start, len(bits) + 1):
            assert mask.read(start, stop).tolist() == bits[start:stop]


def test_every_flipped_bit_and_every_cut_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.mask"
    write_mask(path, np.arange(19) % 3 == 0)
    content = path.read_bytes()
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(UserError, match=r"MZ-225 .*x.mask: (damaged: )?expected .* got .*; copy it again"):
            LossMask(path, 19)
    for size in range(len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(UserError, match="MZ-225"):
            LossMask(path, 19)
    path.write_bytes(content)
    for tokens in (18, 20, 27):
        with pytest.raises(UserError, match=r"MZ-225 .*: expected .* tokens in 2[78] bytes, got .* of 19 in 27; copy"):
            LossMask(path, tokens)
    assert LossMask(path, 19).digest


def test_a_mask_that_is_not_the_data_sets_is_refused(tmp_path: Path) -> None:
    prefix, scored = tmp_path / "web-v1.5", np.arange(9) % 2 == 0
    dataset = write(prefix, [4, 5], scored)
    assert dataset.mask_digest is not None and mask_path(prefix).name == "web-v1.5.mask"
    origin = Origin("0123456789abcdef", 9, 2, 9, 9, 9, 5, dataset.mask_digest)
    origin.write(prefix)
    require_mask(read_origin(prefix), dataset.mask_digest, prefix)
    require_mask(None, dataset.mask_digest, prefix)
    with pytest.raises(UserError, match=r"MZ-225 .*web-v1.5.mask: is missing, but web-v1.5.json names it"):
        require_mask(read_origin(prefix), None, prefix)
    other = write(tmp_path / "other", [9], ~scored)
    with pytest.raises(UserError, match=r"MZ-225 .*has xxh3 \w+, web-v1.5.json records \w{16}"):
        require_mask(read_origin(prefix), other.mask_digest, prefix)
    Origin("0123456789abcdef", 9, 2, 9, 9, 9, 5).write(prefix)
    with pytest.raises(UserError, match=r"web-v1.5.json records none"):
        require_mask(read_origin(prefix), dataset.mask_digest, prefix)
    (tmp_path / "web-v1.5.json").write_text((tmp_path / "web-v1.5.json").read_text().replace("null", "5"))
    with pytest.raises(UserError, match=r"MZ-203 .*mask: Input should be a valid string"):
        read_origin(prefix)


def test_what_replaces_a_data_set_takes_its_mask_away(tmp_path: Path) -> None:
    assert write(tmp_path / "x", [3], np.ones(3, bool)).mask_digest is not None
    assert write(tmp_path / "x", [3], None).mask_digest is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.idx"]


@pytest.mark.parametrize("mask_eod", [False, True])
def test_a_target_counts_where_the_mask_says_so(tmp_path: Path, mask_eod: bool) -> None:
    """Against the definition, also of documents that do not lie beside each other in the file."""
    rng = np.random.default_rng(5)
    lengths = rng.integers(1, 9, 40).tolist()
    scored = rng.random(sum(lengths)) < 0.4
    dataset = write(tmp_path / "x", lengths, scored)
    document = np.repeat(np.arange(40), lengths)
    for chosen in (np.arange(40), np.flatnonzero(rng.random(40) < 0.5), np.array([0, 39])):
        stream = TokenStream(dataset, Chosen(chosen))
        windows = WindowDataset(stream, 4, 1000, mask_eod)
        places = np.flatnonzero(np.isin(document, chosen))  # ids are places in the file
        for k in range(windows.num_windows):
            batch = windows.micro_batch(np.array([k]), np.array([k]))
            targets = batch.targets_SB[:, 0].numpy()
            assert (targets == places[4 * k + 1 : 4 * k + 5]).all()
            same = document[targets] == document[batch.tokens_SB[:, 0].numpy()]
            assert batch.valid_SB[:, 0].tolist() == (scored[targets] & (same | (not mask_eod))).tolist()


def test_another_mask_is_other_data(tmp_path: Path) -> None:
    scored = np.arange(9) % 2 == 0
    digests = {
        TokenStream(write(tmp_path / str(k), [4, 5], each), Chosen(np.arange(2))).digest()
        for k, each in enumerate((None, scored, ~scored, scored))
    }
    assert len(digests) == 3
