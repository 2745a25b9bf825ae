"""The order of a growing source, against one that is written down step by step."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megazero.data.growth import Generation, GrowingOrder
from megazero.data.sampler import window_of

SEEDS = [11, 22, 33, 44]


@settings(max_examples=30)  # each asks for every window by itself
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=3), st.integers(1, 8))
def test_each_window_comes_once_in_a_pass(grows: list[tuple[int, int]], windows: int) -> None:
    """What is left of a pass and what is new are one pass; passes of all windows follow."""
    generations = [Generation(0, windows)]
    for numbers, more in grows:
        generations.append(Generation(generations[-1].first + numbers, generations[-1].windows + more))
    order = GrowingOrder(generations, SEEDS)
    end = generations[-1].first + 3 * generations[-1].windows
    found = order.window_of(np.arange(end)).tolist()
    left = set(range(windows))  # of the pass under way
    ends = [each.first for each in generations[1:]] + [end]
    for k, (generation, stop) in enumerate(zip(generations, ends, strict=True)):
        if k:
            left |= set(range(generations[k - 1].windows, generation.windows))
        for window in found[generation.first : stop]:
            left = left or set(range(generation.windows))
            assert window in left
            left.remove(window)
    for window in range(generations[-1].windows):
        assert list(order.numbers_of(window, end)) == [n for n, each in enumerate(found) if each == window]
        assert list(order.numbers_of(window, end // 2)) == [n for n, w in enumerate(found[: end // 2]) if w == window]


def test_one_generation_is_the_order_of_any_source() -> None:
    numbers = np.arange(500).reshape(5, 100)
    assert np.array_equal(GrowingOrder([Generation(0, 37)], SEEDS).window_of(numbers), window_of(numbers, 37, 11))


@pytest.mark.parametrize("windows", [10**9, 10**13])
def test_huge_sources_grow_too(windows: int) -> None:
    order = GrowingOrder(
        [Generation(0, windows), Generation(10**8, windows + 10**7), Generation(10**9, 2 * windows)], SEEDS
    )
    numbers = np.random.default_rng(0).integers(0, 2 * windows, 200)
    found = order.window_of(numbers)
    for number, window in zip(numbers[:60].tolist(), found[:60].tolist(), strict=True):
        assert number in list(order.numbers_of(window, number + 1))
