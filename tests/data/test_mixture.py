"""A mixture reads every window of every source once per epoch, at the same speed for one source or a hundred."""

import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megazero.data.documents import TokenStream
from megazero.data.loader import BatchLoader
from megazero.data.mixture import Mixture, Phase, Source, seed_of
from megazero.data.sampler import window_of
from megazero.data.windows import WindowDataset
from tests.chosen import Chosen


class Windows:
    """So many windows of no text."""

    mask_eod = False

    def __init__(self, num_windows: int):
        self.num_windows = num_windows


def mixture(sizes: list[int], weights: list[int], seed: int = 5) -> Mixture:
    each = zip(sizes, weights, strict=True)
    return Mixture(
        [Source(f"s{k}", Windows(size), weight, seed_of(seed, f"s{k}")) for k, (size, weight) in enumerate(each)]  # type: ignore[arg-type]
    )


SOURCES = st.lists(st.tuples(st.integers(10, 30), st.integers(1, 9)), min_size=1, max_size=5)


@given(SOURCES, st.integers(0, 2**40))
@settings(max_examples=20)
def test_every_window_of_a_source_once_per_epoch(sources: list[tuple[int, int]], seed: int):
    sizes, weights = (list(part) for part in zip(*sources, strict=True))
    found = mixture(sizes, weights, seed)
    samples = 3 * sum(weights) * max(sizes)
    of, windows = found.locate(np.arange(samples))
    for source, size in enumerate(sizes):
        own = windows[of == source]
        for epoch in range(len(own) // size):
            assert sorted(own[epoch * size : (epoch + 1) * size].tolist()) == list(range(size))
        assert max(Counter(own[len(own) // size * size :].tolist()).values(), default=1) == 1
    epochs = found.epochs(samples)
    assert epochs is not None
    counts = [int((of == source).sum()) for source in range(len(sizes))]
    assert list(epochs.values()) == [count / size for count, size in zip(counts, sizes, strict=True)]
    assert found.counts(samples).tolist() == counts


@given(st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3).filter(any), min_size=1, max_size=4), st.data())
@settings(max_examples=10)
def test_phases_go_on_where_a_source_was(weights: list[list[int]], data: st.DataObject):
    """Shares are exact in each phase, and no window comes twice in an epoch."""
    sizes = [11, 17, 40]
    lengths = [data.draw(st.integers(1, 30)) for _ in weights]
    firsts = [sum(lengths[:number]) for number in range(len(weights))]
    sources = mixture(sizes, [1, 1, 1]).sources
    found = Mixture(sources, [Phase(first, tuple(each)) for first, each in zip(firsts, weights, strict=True)])
    total = firsts[-1] + 60
    of, windows = found.locate(np.arange(total))
    for first, end, each in zip(firsts, [*firsts[1:], total], weights, strict=True):
        for source, weight in enumerate(each):
            counts = np.cumsum(of[first:end] == source) * sum(each)
            assert (np.abs(counts - np.arange(1, end - first + 1) * weight) < sum(each)).all()
    for source, size in enumerate(sizes):
        own = windows[of == source]
        for start in range(0, len(own), size):
            epoch = own[start : start + size].tolist()
            assert len(set(epoch)) == len(epoch)
    for end in (0, *firsts, total):
        assert found.counts(end).tolist() == np.bincount(of[:end], minlength=3).tolist()


def test_one_source_without_a_name_is_what_it_always_was():
    """Runs that were begun before sources had names go on with the same text."""
    found = Mixture([Source(None, Windows(37), 1, 11)])  # type: ignore[arg-type]
    ids = np.arange(100)
    sources, windows = found.locate(ids)
    assert not sources.any() and np.array_equal(windows, window_of(ids, 37, 11)) and found.epochs(100) is None


def test_sources_seeds_and_epochs_have_orders_of_their_own():
    """Seed s and epoch e + 1 is not seed s + 1 and epoch e, and two sources of one size are not in one order."""
    size = 500
    orders = {}
    for seed in (3, 4):
        of, windows = mixture([size, size], [1, 1], seed).locate(np.arange(4 * size))
        for source in (0, 1):
            own = windows[of == source]
            orders |= {(seed, source, epoch): own[epoch * size : (epoch + 1) * size] for epoch in (0, 1)}
    alike = [(a == b).mean() for i, a in enumerate(orders.values()) for b in list(orders.values())[:i]]
    assert len(orders) == 8 and max(alike) < 0.05


def test_a_mixture_reads_its_sources(make_dataset):
    """Each row is the window that `locate` says, whichever source it is of."""
    sources = []
    for name, base, documents in (("a", 0, 30), ("b", 400, 12)):
        dataset = make_dataset([list(range(base + d * 10, base + d * 10 + 10)) for d in range(documents)], name=name)
        windows = WindowDataset(TokenStream(dataset, Chosen(np.arange(documents))), 8, 1000, True)
        sources.append(Source(name, windows, 1 + (name == "a"), seed_of(1, name)))
    found = Mixture(sources)
    ids = np.arange(12).reshape(3, 4)
    of, windows = found.locate(ids)
    for batch, rows, samples, chosen in zip(found.micro_batches(ids), windows, ids, of, strict=True):
        assert batch.sample_ids_B.tolist() == samples.tolist() and batch.documents is not None
        for b, (window, source) in enumerate(zip(rows.tolist(), chosen.tolist(), strict=True)):
            assert batch.tokens_SB[:, b].tolist() == list(
                range(400 * source + 8 * window, 400 * source + 8 * window + 8)
            )
    assert found.digest() != Mixture(sources[::-1]).digest() and found.digest().startswith("2 sources, xxh3 ")


def test_a_hundred_sources_hold_no_memory_and_repeat_no_work(make_dataset):
    """A step of many sources calls the permutation once, and what a loader holds does not grow with steps."""
    dataset = WindowDataset(TokenStream(make_dataset([list(range(400))]), Chosen(np.arange(1))), 8, 1000, False)
    found = Mixture([Source(f"s{k}", dataset, 1 + k % 3, seed_of(1, f"s{k}")) for k in range(100)])
    loader = BatchLoader(found, global_batch=8, micro_batch=4)
    held = []
    tracemalloc.start()
    for step in range(60):
        loader.step(step * 10**6)
        held += [tracemalloc.get_traced_memory()[0]] if step in (19, 59) else []
    tracemalloc.stop()
    loader.close()
    assert held[1] - held[0] < 20_000


def chi_square(counts: np.ndarray) -> float:
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("num_windows", [10, 1000, 10**5, 10**7, 10**9])
def test_orders_are_uniform_and_neighbours_independent(num_windows: int):
    """Chi-square of the tenth in which a sample's window lies; serial: of it and the next one's; over epochs and seeds.

    Bounds: mean + 5 deviations, which are (n, sqrt(2 n)) for n degrees of freedom. The serial test of 10 windows leaves
    out that no window follows itself: parts are single windows there.
    """
    size, epochs = min(num_windows, 1000), 20_000 // min(num_windows, 1000)
    single, pairs = np.zeros(10, np.int64), np.zeros((10, 10), np.int64)
    for seed in (1, 2, 3):
        starts = np.arange(epochs)[:, None] * num_windows + (0 if num_windows <= 1000 else num_windows // 3)
        parts = window_of(starts + np.arange(size), num_windows, seed) * 10 // num_windows
        firsts = parts[:, 0] if num_windows <= 1000 else parts.ravel()
        single += np.bincount(firsts, minlength=10)
        np.add.at(pairs, (parts[:, :-1:2].ravel(), parts[:, 1::2].ravel()), 1)
    assert chi_square(single) < 9 + 5 * 18**0.5
    if num_windows == 10:
        assert not pairs.diagonal().any()
        assert chi_square(pairs[~np.eye(10, dtype=bool)]) < 89 + 5 * 178**0.5
    elif num_windows == 1000:  # of the same part there is one window less to follow
        expected = np.full((10, 10), 0.1 * 100 / 999) - np.eye(10) * 0.1 / 999
        expected *= pairs.sum() / expected.sum()
        assert float(((pairs - expected) ** 2 / expected).sum()) < 99 + 5 * 198**0.5
    else:
        assert chi_square(pairs) < 99 + 5 * 198**0.5


@pytest.mark.parametrize("num_windows", [1000, 10**9])
def test_seeds_and_epochs_are_independent(num_windows: int):
    """The window of the same sample under the next seed, and the next epoch, by chi-square of pairs of parts."""
    ids = np.arange(20_000) * (num_windows + 1)  # every epoch, another place in each
    for other in (window_of(ids, num_windows, 8), window_of(ids + num_windows, num_windows, 7)):
        pairs = np.zeros((10, 10), np.int64)
        np.add.at(pairs, (window_of(ids, num_windows, 7) * 10 // num_windows, other * 10 // num_windows), 1)
        assert chi_square(pairs) < 99 + 5 * 198**0.5
