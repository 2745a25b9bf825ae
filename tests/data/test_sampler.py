"""Properties of the three sampling functions."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megazero.data.sampler import index_of, sample_id, window_of

SMALL = st.integers(1, 6)
SEEDS = st.integers(0, 2**64 - 1)


@given(SMALL, SMALL, SMALL)
def test_the_row_counts_fastest_then_the_rank_then_the_micro_batch(num_data: int, num_micro: int, micro: int):
    places = [(d, m, r) for m in range(num_micro) for d in range(num_data) for r in range(micro)]
    assert [index_of(d, m, r, num_data, micro) for d, m, r in places] == list(range(len(places)))


@given(st.integers(0, 10**6), st.integers(1, 1000))
def test_sample_ids_of_consecutive_steps_follow_each_other(step: int, global_batch: int):
    assert sample_id(step, global_batch - 1, global_batch) + 1 == sample_id(step + 1, 0, global_batch)


@given(st.integers(1, 3000), SEEDS, st.integers(0, 2**40))
@settings(max_examples=30)
def test_every_window_once_per_epoch(num_windows: int, seed: int, epoch: int):
    windows = window_of(epoch * num_windows + np.arange(num_windows), num_windows, seed)
    assert np.array_equal(np.sort(windows), np.arange(num_windows))


@given(st.integers(50, 3000), SEEDS, st.integers(0, 10**6))
@settings(max_examples=30)
def test_every_epoch_and_seed_has_its_own_order(num_windows: int, seed: int, epoch: int):
    ids = np.arange(num_windows)
    order = window_of(epoch * num_windows + ids, num_windows, seed)
    next_epoch = window_of((epoch + 1) * num_windows + ids, num_windows, seed)
    next_seed = window_of(epoch * num_windows + ids, num_windows, (seed + 1) % 2**64)
    high_bits = window_of(epoch * num_windows + ids, num_windows, seed ^ 2**40)
    orders = [ids, order, next_epoch, next_seed, high_bits]
    assert all((a != b).mean() > 0.5 for i, a in enumerate(orders) for b in orders[:i])


@given(st.integers(1, 2**50), SEEDS, st.lists(st.integers(0, 2**60), min_size=1, max_size=8))
@settings(max_examples=30)
def test_each_sample_by_itself_and_huge_data_sets_work(num_windows: int, seed: int, ids: list[int]):
    vector = window_of(np.array([ids]), num_windows, seed)
    assert vector.shape == (1, len(ids)) and (vector >= 0).all() and (vector < num_windows).all()
    assert [int(window_of(np.array([i]), num_windows, seed)[0]) for i in ids] == vector[0].tolist()


def test_orders_of_four_windows_are_uniform():
    """24 orders, 6,000 epochs: chi-square with 23 degrees of freedom, mean 23, deviation 6.8."""
    orders = window_of(np.arange(4 * 6_000), 4, 7).reshape(-1, 4) @ np.array([64, 16, 4, 1])
    _, counts = np.unique(orders, return_counts=True)
    assert len(counts) == 24 and ((counts - 250) ** 2 / 250).sum() < 23 + 5 * 6.8


def test_the_order_never_changes():
    """Resuming a run relies on it: these numbers are part of the format of a run."""
    assert window_of(np.arange(12), 10, 1234).tolist() == [3, 9, 4, 7, 0, 5, 6, 8, 2, 1, 3, 8]
