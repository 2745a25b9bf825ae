"""Compute random numbers as functions of names (counter-based), independent of ranks.

A random number is a pure function of its *purpose*: an initial weight of (seed, parameter name, index), a dropout
decision of (seed, step, layer, site, sample, position, channel). There is no generator with a state, so the rank, the
order and the number of calls do not matter: every layout, replay and resumed run uses the same numbers, and a kernel
can recompute a mask instead of storing it.

The hash is the 32-bit two-multiply mixer found by exhaustive search in C. Wellons, "Prospecting for Hash Functions"
(2018): x ^= x >> 16; x *= 0x7feb352d; x ^= x >> 15; x *= 0x846ca68b; x ^= x >> 16. It is a bijection of 32-bit words
with a bias near the sampling floor, exact in integers (so equal on every device), and costs two multiplies. A single
hash of `key ^ counter` would give two names with similar keys the same numbers in another order; so every counter is
hashed with one key, then again with a second one.

Tensors of counters are int32: torch multiplies them modulo 2^32, and the sign bit is just the 32nd bit. To convert a
hash to a number, 2^31 is added to the signed word, which gives the unsigned word with its top bit inverted.
docs/numerics.md specifies everything for another implementation, with test vectors.
"""

import math
from typing import TypeVar

import numpy as np
import torch
import xxhash
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLY_1 = 0x7FEB352D
_MULTIPLY_2 = 0x846CA68B
_GOLDEN = 0x9E3779B9  # 2^32 / golden ratio: spreads consecutive channels over the whole range

# Normal values are computed in blocks of _BLOCK, aligned on the parameter's flat index, for any requested interval: so
# a value has the same place in a vector register in every layout, and vectorised functions give equal results.
# One thread computes a block: a multi-threaded operation waits for all its threads, which takes 50 times as long when
# other processes use the cores. So NumPy hashes, and torch's erfinv gets _UNSHARED values, too few to use threads.
_BLOCK, _UNSHARED = 1 << 14, 1 << 11
_Words = TypeVar("_Words", Tensor, np.ndarray)


def _signed(word: int) -> int:
    """Return the int32 with the bits of the unsigned 32-bit `word`."""
    return word - (1 << 32) if word & 0x80000000 else word


def mix_word(word: int) -> int:
    """Return the hash of one unsigned 32-bit word, in Python integers."""
    word ^= word >> 16
    word = word * _MULTIPLY_1 & _MASK
    word ^= word >> 15
    word = word * _MULTIPLY_2 & _MASK
    return word ^ word >> 16


def mix_(x: _Words) -> _Words:
    """Hash every element of the int32 `x` in place."""
    x = _xor_shifted_(x, 16)
    x *= _MULTIPLY_1
    x = _xor_shifted_(x, 15)
    x *= _signed(_MULTIPLY_2)
    return _xor_shifted_(x, 16)


def _xor_shifted_(x: _Words, places: int) -> _Words:
    shifted = x >> places  # an arithmetic shift of int32, so remove the copies of the sign bit
    shifted &= _MASK >> places
    x ^= shifted
    return x


def derive_key(*words: int) -> int:
    """Return an unsigned 32-bit key derived from unsigned 64-bit words, each hashed in as two 32-bit halves."""
    key = 0
    for word in words:
        assert 0 <= word < 1 << 64, f"a key is made of unsigned 64-bit words, got {word}"
        for half in (word & _MASK, word >> 32):
            key = (mix_word(key ^ half) + _GOLDEN) & _MASK
    return key


def normal(seed: int, name: str, start: int, stop: int) -> Tensor:
    """Return standard normal values for the flat indices [start, stop) of a parameter: fp64 [stop - start].

    Each is sqrt(2) erfinv(2u - 1) with u = ((h xor 2^31) + 1/2) / 2^32 and h the hash of the index as an unsigned word.
    So values are within 6.3 standard deviations, and value i does not depend on the interval.
    """
    digest = xxhash.xxh64_intdigest(name.encode())
    pieces = []
    for block in range(start // _BLOCK, -(-stop // _BLOCK)):
        base = block * _BLOCK
        high, low = base >> 32, base & _MASK
        first = derive_key(seed, digest, high)
        second = derive_key(first, digest)
        x = np.arange(_BLOCK, dtype=np.int32)
        x += np.int32(_signed((low + first) & _MASK))
        x = mix_(mix_(x) ^ np.int32(_signed(second)))
        # A signed word plus 2^31 is the unsigned one with its top bit inverted.
        values = torch.from_numpy(x.astype(np.float64)).add_(2.0**31 + 0.5).mul_(2.0**-32).mul_(2.0).sub_(1.0)
        for part in values.split(_UNSHARED):
            part.erfinv_()
        values.mul_(math.sqrt(2.0))
        pieces.append(values[max(start - base, 0) : min(stop - base, _BLOCK)])
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.float64)


def words(key: int, start: int, stop: int, step: Tensor) -> Tensor:
    """Return 32 random bits for each of the flat indices [start, stop) of a parameter: int32 [stop - start].

    Args:
        key: made with `derive_key` of everything else that they depend on.
        step: one more number that they depend on; 0-dim, so that the host need not know it.
    """
    index = torch.arange(start, stop, device=step.device)
    index ^= (index >> 32) * _GOLDEN
    return mix_(mix_(index.to(torch.int32) + _signed(key)) ^ mix_(step.to(torch.int32) + _signed(derive_key(key))))


def keep_mask(key: int, sample_ids_B: Tensor, positions_S: Tensor, channels: Tensor, drop: float) -> Tensor:
    """Return the mask of the elements that dropout keeps: bool [S, B, D].

    Args:
        key: `derive_key(seed, step, layer, site)`.
        sample_ids_B: int64 global sample ids.
        positions_S: int64 positions in the whole sequence, of this rank's part.
        channels: int64 [D], the hidden channels.
        drop: the dropout probability. With h the unsigned hash of an element, it is kept if h xor 2^31 is at least
            drop x 2^32, rounded half to even and limited to 2^32 - 1.
    """
    second = derive_key(key, 1)
    ids = (sample_ids_B ^ (sample_ids_B >> 32) * _GOLDEN).to(torch.int32)
    rows_SB = mix_(mix_(ids + _signed(key))[None, :] ^ positions_S.to(torch.int32)[:, None])
    words = rows_SB[:, :, None] + channels.to(torch.int32) * _signed(_GOLDEN)
    words ^= _signed(second)
    # Signed words have the order of unsigned words with inverted top bit, so the threshold is lower by 2^31.
    return mix_(words) >= min(round(drop * 2**32) - 2**31, 2**31 - 1)
