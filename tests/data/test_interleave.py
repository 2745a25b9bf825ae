"""Sources are mixed by weight: every prefix has its share, at any length, and every sample its place."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megazero.config.weights import whole_weights
from megazero.data.interleave import Interleaving

WEIGHTS = st.lists(st.integers(1, 60), min_size=1, max_size=12)


def checked(weights: list[int], first: int, length: int) -> None:
    """Within one of its share is every source after each of so many samples, in whole numbers."""
    order, period = Interleaving(weights), sum(weights)
    sources, _ = order.of(np.arange(first, first + length))
    before = order.counts(first)
    after = np.arange(first + 1, first + length + 1)
    for source, weight in enumerate(weights):
        counts = int(before[source]) + np.cumsum(sources == source)
        assert (np.abs(counts * period - after * weight) < period).all()


@given(WEIGHTS, st.integers(0, 10**12))
def test_every_prefix_has_its_share(weights: list[int], first: int):
    checked(weights, 0, 2 * sum(weights))
    checked(weights, first, 50)


@pytest.mark.parametrize("weights", [[1] * 100, [999, 1], [1, 2, 4, 8, 16, 32, 64, 128], [5000] * 3 + [1] * 97, [7]])
def test_every_prefix_has_its_share_of_odd_weights(weights: list[int]):
    checked(weights, 0, 2 * sum(weights))


@given(WEIGHTS, st.integers(0, 10**12))
def test_numbers_count_the_samples_of_each_source(weights: list[int], first: int):
    """And the way back is exact."""
    order, ids = Interleaving(weights), np.arange(first, first + 60)
    sources, numbers = order.of(ids)
    counts = order.counts(first)
    for source, number in zip(sources.tolist(), numbers.tolist(), strict=True):
        assert number == counts[source]
        counts[source] += 1
    assert order.counts(first + 60).tolist() == counts.tolist() and counts.sum() == first + 60


@given(WEIGHTS)
def test_shapes_do_not_matter(weights: list[int]):
    order, ids = Interleaving(weights), np.arange(24)
    for flat, shaped in zip(order.of(ids), order.of(ids.reshape(2, 3, 4)), strict=True):
        assert shaped.shape == (2, 3, 4) and np.array_equal(flat, shaped.ravel())


def test_the_order_never_changes():
    """Resuming a run relies on it: these numbers are part of the format of a run."""
    assert Interleaving([7, 2, 1]).of(np.arange(12))[0].tolist() == [0, 0, 0, 1, 0, 0, 1, 0, 0, 2, 0, 0]


@pytest.mark.parametrize(
    ("weights", "whole"),
    [
        ([1.0], [1]),
        ([0.7, 0.2, 0.1], [7, 2, 1]),
        ([2.0, 4.0, 6.0], [1, 2, 3]),
        ([1e-3, 1.0], [1, 1000]),
        ([0.3333, 0.6667], [3333, 6667]),
        ([1e20, 1e20], [1, 1]),
        ([1.5, 0.25], [6, 1]),
    ],
)
def test_weights_are_the_decimals_that_people_write(weights: list[float], whole: list[int]):
    assert whole_weights(weights) == whole
