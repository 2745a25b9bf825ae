"""Packing: the windows of first-fit decreasing, each document in one of them, and nothing seen or scored across."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megazero.data.documents import TokenStream
from megazero.data.packing import Packing
from megazero.data.windows import WindowDataset
from tests.chosen import Chosen
from tests.data.test_loss_mask import write


def first_fit_decreasing(lengths: list[int], size: int) -> list[list[int]]:
    """Each document, by falling length, into the first window that has room."""
    windows: list[list[int]] = []
    room: list[int] = []
    for document in sorted(range(len(lengths)), key=lambda document: -min(lengths[document], size)):
        length = min(lengths[document], size)
        if length < 2:
            continue
        place = next((k for k, left in enumerate(room) if left >= length), len(room))
        if place == len(room):
            windows.append([])
            room.append(size)
        windows[place].append(document)
        room[place] -= length
    return windows


@given(st.lists(st.integers(0, 25), max_size=60), st.integers(4, 20))
def test_windows_are_those_of_first_fit_decreasing(lengths: list[int], size: int) -> None:
    packing = Packing(np.array(lengths, np.int64), size)
    found = [packing.documents(window) for window in range(packing.num_windows)]
    expected = first_fit_decreasing(lengths, size)

    def taken(windows: list[list[int]]) -> list[list[int]]:
        return [[min(lengths[document], size) for document in window] for window in windows]

    assert taken(found) == taken(expected)
    assert sorted(document for window in found for document in window) == [
        document for document, length in enumerate(lengths) if length >= 2
    ]
    assert all(sum(min(lengths[document], size) for document in documents) <= size for documents in found)
    assert packing.num_cut == sum(length > size for length in lengths)
    if found:
        assert packing.fill == pytest.approx(sum(map(sum, taken(found))) / (size * len(found)))


def test_many_documents_are_few_rows() -> None:
    lengths = np.minimum(np.random.default_rng(0).lognormal(6, 1, 100_000).astype(np.int64) + 2, 8192)
    packing = Packing(lengths, 8192)
    assert packing.fill > 0.999 and len(packing._rows) < 3 * len(np.unique(lengths))


def test_a_window_is_whole_documents_and_padding(tmp_path) -> None:
    """Against the definition: tokens, targets, positions, lengths and what counts."""
    rng = np.random.default_rng(3)
    lengths = rng.integers(1, 14, 50).tolist()
    starts = np.cumsum([0, *lengths])
    scored = rng.random(sum(lengths)) < 0.5
    dataset = write(tmp_path / "x", lengths, scored)
    chosen = np.flatnonzero(rng.random(50) < 0.8)
    windows = WindowDataset(TokenStream(dataset, Chosen(chosen)), 10, 1000, True, pack=True)
    seen: list[int] = []
    for k in range(windows.num_windows):
        batch = windows.micro_batch(np.array([k]), np.array([k]))
        assert batch.documents is not None and batch.positions_SB is not None
        tokens, targets = batch.tokens_SB[:, 0].tolist(), batch.targets_SB[:, 0].tolist()
        valid, positions, at = batch.valid_SB[:, 0].tolist(), batch.positions_SB[:, 0].tolist(), 0
        assert sum(batch.documents[0]) == 10
        for length in batch.documents[0]:
            assert positions[at : at + length] == list(range(length))
            if not any(tokens[at:]):  # padding; of documents at most the first id of all is 0
                assert not any(valid[at:]) and at + length == 10
                break
            document = int(np.searchsorted(starts, tokens[at], side="right")) - 1
            seen.append(document)
            assert document in chosen and length == min(lengths[document], 10)
            assert tokens[at : at + length] == list(range(starts[document], starts[document] + length))
            assert targets[at : at + length - 1] == tokens[at + 1 : at + length]
            assert valid[at : at + length - 1] == [bool(scored[target]) for target in targets[at : at + length - 1]]
            assert not valid[at + length - 1]
            at += length
    assert sorted(seen) == [document for document in chosen if lengths[document] >= 2]
