"""Three pure functions that determine which text is in which batch.

There is no cursor to save. Step s of a run with a global batch of G sequences consumes samples s x G to s x G + G - 1;
a resumed run, or one on another grid, calls the same functions and gets the same text in the same order.

    sample_id(s, i, G) = s G + i                                        the i-th sequence of step s
    i = (micro_batch x num_data + data_rank) x micro + row              where it is computed
    window_of(id, N, seed) = permutation[seed, id // N](id mod N)       which of N windows of text it is

The permutation is a Feistel network: swap-and-mix rounds on the two halves of a number are a bijection of [0, 2^2h)
for any round function; numbers outside [0, N) are permuted again ("cycle walking"), which gives a bijection of [0, N).
So every epoch visits every window exactly once, each epoch and each seed in its own order, and any element costs a few
dozen integer operations and no memory. Source: J. Black and P. Rogaway, Ciphers with
Arbitrary Finite Domains, CT-RSA 2002, sections 3 (cycle walking) and 5 (Feistel).
"""

import numpy as np

from megazero.data.choice import mix

_ROUNDS = 8
_MIN_HALF_BITS = 4  # smaller halves give the rounds too few bits to mix: orders of 3 windows would not be uniform
_WORD = np.uint64(0xFFFFFFFF)


def sample_id(step: int, index: int, global_batch: int) -> int:
    """Return the number, over the whole run, of sequence `index` of a step."""
    return step * global_batch + index


def index_of(data_rank: int, micro_batch: int, row: int, num_data: int, micro: int) -> int:
    """Return which sequence of a step a rank computes in a row of a micro-batch; the row varies fastest, then the rank.

    Args:
        data_rank, num_data: the rank on the data axis, and the size of the axis.
        micro_batch, row: the place among the rank's sequences of the step.
        micro: sequences per micro-batch.
    """
    return (micro_batch * num_data + data_rank) * micro + row


def window_of(ids: np.ndarray, num_windows: int | np.ndarray, seed: int | np.ndarray) -> np.ndarray:
    """Return the window of each sample (int64 ids of any shape), in [0, num_windows).

    Among the ids e x N ... e x N + N - 1 of an epoch e every window comes exactly once.

    Args:
        num_windows, seed: for all samples, or for each (int64 and uint64 of the samples' shape).
    """
    counts = np.broadcast_to(np.asarray(num_windows, np.int64), ids.shape)
    assert (counts > 0).all()
    epochs, positions = np.divmod(ids, counts)
    keys, halves = _round_keys(epochs.astype(np.uint64), np.asarray(seed, np.uint64)), _halves(counts)
    windows = _permute(positions.astype(np.uint64), keys, halves)
    limits = counts.astype(np.uint64)
    while (outside := windows >= limits).any():  # at most 4 tries on average: 2^2h < 4 N, unless N is tiny
        windows[outside] = _permute(windows[outside], keys[:, outside], halves[outside])
    return windows.astype(np.int64)


def _halves(num_windows: np.ndarray) -> np.ndarray:
    """Return half the bits of num_windows - 1, rounded up, uint64; at least _MIN_HALF_BITS. num_windows < 2^53."""
    assert (num_windows < 2**53).all()
    bits = np.frexp((num_windows - 1).astype(np.float64))[1]  # 0, 1, 2 and 3, 4 ... have 0, 1, 2, 3 ... bits
    return np.maximum(_MIN_HALF_BITS, (bits + 1) // 2).astype(np.uint64)


def _round_keys(epochs: np.ndarray, seeds: np.ndarray) -> np.ndarray:
    """Return 32-bit keys, uint64 [rounds, *shape of epochs], from seed and epoch (64 bits each) and the round."""
    key = mix((seeds & _WORD) ^ np.uint64(0x9E3779B9) | np.zeros_like(epochs))
    key = mix(key ^ (seeds >> np.uint64(32)))
    key = mix(key ^ (epochs & _WORD))
    key = mix(key ^ (epochs >> np.uint64(32)))
    return np.stack([mix((key + np.uint64(0x9E3779B9 * (round_ + 1))) & _WORD) for round_ in range(_ROUNDS)])


def _permute(x: np.ndarray, keys: np.ndarray, halves: np.ndarray) -> np.ndarray:
    """Apply a Feistel network with its own round keys to each element of x, a bijection of [0, 2^(2 half))."""
    masks = (np.uint64(1) << halves) - np.uint64(1)
    left, right = x >> halves, x & masks
    for key in keys:
        left, right = right, left ^ (mix(right ^ key) & masks)
    return (left << halves) | right
