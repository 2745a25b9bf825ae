"""The split by documents, and documents joined to a stream."""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megazero.base.errors import UserError
from megazero.data import documents
from megazero.data.choice import Side, mix
from megazero.data.documents import TokenStream, split_streams
from tests.chosen import Chosen


def split_documents(num_documents: int, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of (training, validation)."""
    train, valid = (Side(fraction, valid=valid).numbers(0, num_documents) for valid in (False, True))
    return train, valid


@given(st.integers(50, 5000), st.floats(0.2, 0.8))
def test_split_is_a_partition_of_the_right_size(num_documents: int, fraction: float):
    train, valid = split_documents(num_documents, fraction)
    assert np.array_equal(np.sort(np.concatenate([train, valid])), np.arange(num_documents))
    assert (np.diff(train) > 0).all() and (np.diff(valid) > 0).all()
    deviation = (num_documents * fraction * (1 - fraction)) ** 0.5
    assert abs(len(valid) - num_documents * fraction) < 6 * deviation


def test_split_depends_on_the_number_of_a_document_only():
    """More documents, or a larger fraction, move none that were chosen."""
    _, small = split_documents(1000, 0.05)
    _, longer = split_documents(5000, 0.05)
    _, larger = split_documents(1000, 0.1)
    assert np.array_equal(longer[longer < 1000], small) and set(small) < set(larger)


@pytest.mark.parametrize(("num_documents", "fraction"), [(1, 0.5), (0, 0.5), (5, 1e-6), (5, 0.999999)])
def test_empty_side_is_refused_with_numbers(make_dataset, num_documents: int, fraction: float):
    dataset = make_dataset([[1, 2]] * num_documents)
    with pytest.raises(UserError, match=rf"MZ-206.*of {fraction} puts \d of {num_documents} documents"):
        split_streams(dataset, fraction)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 2, float("nan")])
def test_fraction_out_of_range(fraction: float):
    with pytest.raises(UserError, match=r"MZ-206.*between 0 and 1"):
        Side(fraction, valid=True)


def test_mix_is_a_bijection():
    words = np.arange(1 << 16, dtype=np.uint64) << np.uint64(16)
    assert len(np.unique(mix(words))) == len(words) and mix(words).max() < 1 << 32


def test_blocks_of_documents_are_counted(make_dataset, monkeypatch: pytest.MonkeyPatch):
    seen = []

    @contextmanager
    def doing(what: str, total: int):
        seen.append((what, total))
        yield SimpleNamespace(advance=seen.append)

    stream = TokenStream(make_dataset([[1, 2], [3]]), Chosen(np.arange(2)))
    monkeypatch.setattr(documents, "doing", doing)
    assert [len(block.numbers) for block in stream.blocks("reading")] == [2]
    assert seen == [(f"reading of {stream.dataset.prefix}", 2), documents.BLOCK]


def test_equal_tokens_of_other_documents_have_another_digest(make_dataset):
    dataset = make_dataset([[1, 1], [1, 1], [1, 1]])
    digests = {TokenStream(dataset, Chosen(np.array(chosen))).digest() for chosen in ([0, 1], [0, 2], [1, 2])}
    assert len(digests) == 3


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
def test_stream_equals_concatenation(make_dataset, data: st.DataObject):
    documents = data.draw(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=6), min_size=1, max_size=8))
    chosen = sorted(data.draw(st.sets(st.sampled_from(range(len(documents))), min_size=1)))
    stream = TokenStream(make_dataset(documents), Chosen(np.array(chosen)))
    tokens = [token for d in chosen for token in documents[d]]
    ordinals = [i for i, d in enumerate(chosen) for _ in documents[d]]
    assert stream.num_tokens == len(tokens) and stream.num_documents == len(chosen)
    start = data.draw(st.integers(0, len(tokens)))
    stop = data.draw(st.integers(start, len(tokens)))
    read_tokens, read_ordinals = stream.read(start, stop)
    assert read_tokens.tolist() == tokens[start:stop] and read_tokens.dtype == np.int64
    assert read_ordinals.tolist() == ordinals[start:stop]
    for position in range(start, stop):
        document, offset = stream.locate(position)
        assert document == chosen[ordinals[position]] and documents[document][offset] == tokens[position]


@pytest.mark.parametrize("fraction", [0.5, 0.01])
def test_a_window_over_many_short_documents_is_what_stands_in_the_file(make_dataset, fraction: float) -> None:
    """Read in one piece where the chosen ones are near each other, and run by run where they are not."""
    documents = [[number % 300] * (1 + number % 7) for number in range(5000)]
    dataset = make_dataset(documents)
    for chosen in split_documents(len(documents), fraction):
        stream = TokenStream(dataset, Chosen(chosen))
        expected = [token for document in chosen for token in documents[document]]
        for start, stop in ((0, 500), (1, 2), (7, 7), (stream.num_tokens - 60, stream.num_tokens)):
            tokens, _ = stream.read(max(start, 0), min(stop, stream.num_tokens))
            assert tokens.tolist() == expected[max(start, 0) : stop]
