"""Counter-based random numbers, against values computed one by one in Python integers."""

import math
from statistics import NormalDist

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from megazero.kernels import counter

MASK = 0xFFFFFFFF
GOLDEN = 0x9E3779B9


def hash_word(x: int) -> int:
    """The mixer as published, written again."""
    x ^= x >> 16
    x = (x * 0x7FEB352D) & MASK
    x ^= x >> 15
    x = (x * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def one_normal(seed: int, name: str, index: int) -> float:
    digest = xxhash.xxh64_intdigest(name.encode())
    first = counter.derive_key(seed, digest, index >> 32)
    second = counter.derive_key(first, digest)
    word = hash_word(hash_word((index + first) & MASK) ^ second)
    return NormalDist().inv_cdf(((word ^ 0x80000000) + 0.5) / 2**32)


def one_keep(key: int, sample: int, position: int, channel: int, drop: float) -> bool:
    row = hash_word((((sample ^ ((sample >> 32) * GOLDEN)) & MASK) + key) & MASK)
    row = hash_word(row ^ position)
    word = hash_word(((row + channel * GOLDEN) & MASK) ^ counter.derive_key(key, 1))
    return (word ^ 0x80000000) >= round(drop * 2**32)


@given(st.integers(0, MASK))
def test_both_hashes_are_the_published_one(word: int) -> None:
    signed = word - (1 << 32) if word >> 31 else word
    tensor = counter.mix_(torch.tensor([signed], dtype=torch.int32))
    assert counter.mix_word(word) == hash_word(word) == int(tensor) & MASK


@pytest.mark.parametrize("start", [0, 65530, 10**6, 2**32 - 3])
def test_initial_values_one_by_one(start: int) -> None:
    values = counter.normal(7, "blocks.0.mlp.up.weight", start, start + 9)
    expected = [one_normal(7, "blocks.0.mlp.up.weight", start + i) for i in range(9)]
    # Two libraries' inverse of the normal distribution; they agree to about 1e-13.
    assert torch.allclose(values, torch.tensor(expected, dtype=torch.float64), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_value_does_not_depend_on_the_interval(threads: int) -> None:
    torch.set_num_threads(threads)
    whole = counter.normal(1, "w", 0, 200_000)
    for start, stop in ((0, 1), (1, 2), (65_535, 65_537), (123, 131_073), (199_999, 200_000)):
        assert torch.equal(counter.normal(1, "w", start, stop), whole[start:stop])


@pytest.mark.full
def test_values_are_standard_normal_and_independent() -> None:
    n = 1 << 20
    a, b = counter.normal(0, "a", 0, n), counter.normal(0, "b", 0, n)
    other_seed = counter.normal(1, "a", 0, n)
    bound = 5 / math.sqrt(n)  # five standard errors
    for x in (a, b, other_seed):
        assert abs(x.mean()) < bound
        assert abs(x.var() - 1) < bound * math.sqrt(2)
        assert abs((x**4).mean() - 3) < bound * math.sqrt(96)
        assert abs((x[1:] * x[:-1]).mean()) < bound
    for x, y in ((a, b), (a, other_seed), (b, other_seed)):
        assert abs((x * y).mean()) < bound
        assert len(set(x.tolist()) & set(y.tolist())) < n * n / 2**32 * 1.2  # no more common values than by chance


def test_keep_mask_one_by_one() -> None:
    key = counter.derive_key(3, 5, 2, 1)
    samples, positions, channels = torch.tensor([0, 7, 2**33 + 1]), torch.arange(4, 8), torch.arange(5)
    mask = counter.keep_mask(key, samples, positions, channels, 0.3)
    for s in range(4):
        for b in range(3):
            for d in range(5):
                assert bool(mask[s, b, d]) == one_keep(key, int(samples[b]), int(positions[s]), d, 0.3)


def test_keep_mask_depends_on_names_not_on_places() -> None:
    key, channels = counter.derive_key(0, 1, 2, 0), torch.arange(64)
    samples = torch.tensor([11, 4, 9])
    whole = counter.keep_mask(key, samples, torch.arange(32), channels, 0.1)
    assert torch.equal(counter.keep_mask(key, samples, torch.arange(8, 16), channels, 0.1), whole[8:16])
    assert torch.equal(counter.keep_mask(key, samples[1:2], torch.arange(32), channels, 0.1), whole[:, 1:2])
    assert torch.equal(counter.keep_mask(key, samples, torch.arange(32), channels[16:], 0.1), whole[:, :, 16:])
    for other in (counter.derive_key(0, 2, 2, 0), counter.derive_key(0, 1, 3, 0), counter.derive_key(1, 1, 2, 0)):
        assert not torch.equal(counter.keep_mask(other, samples, torch.arange(32), channels, 0.1), whole)


@pytest.mark.parametrize("drop", [0.05, 0.1, 0.5, 0.9])
def test_keep_mask_keeps_the_share_it_should(drop: float) -> None:
    mask = counter.keep_mask(
        counter.derive_key(1), torch.arange(16), torch.arange(128), torch.arange(256), drop
    ).double()
    n = mask.numel()
    assert abs(mask.mean() - (1 - drop)) < 5 * math.sqrt(drop * (1 - drop) / n)
    centred = mask - mask.mean()
    for dim in range(3):  # neighbours in sequence, sample and channel are uncorrelated
        a, b = centred.narrow(dim, 0, mask.shape[dim] - 1), centred.narrow(dim, 1, mask.shape[dim] - 1)
        assert abs((a * b).mean()) < 5 * drop * (1 - drop) / math.sqrt(a.numel())


def test_keys_use_all_bits_of_all_words() -> None:
    words = ((0,), (1,), (0, 0), (0, 1), (1, 0), (2**32,), (2**32 + 1,), (2**40,), (2**63,))
    assert len({counter.derive_key(*each) for each in words}) == len(words)


def test_dropping_all_but_nothing_drops_all() -> None:
    mask = counter.keep_mask(1, torch.arange(4), torch.arange(8), torch.arange(16), 1 - 1e-12)
    assert not mask.any()
