"""Random numbers that are functions of names, never of ranks.

A random number here is a pure function of *what it is for*: an initial weight of (seed, parameter name, index), a
dropout decision of (seed, step, layer, site, sample, position, channel). Nothing is drawn from a stream, so nothing
depends on which rank draws, in which order, or how often: every layout, every replay and every resumed run sees the
same numbers, and a kernel can recompute a mask instead of storing it.

The hash is the 32-bit two-multiply mixer found by exhaustive search in C. Wellons, "Prospecting for Hash Functions"
(2018): x ^= x >> 16; x *= 0x7feb352d; x ^= x >> 15; x *= 0x846ca68b; x ^= x >> 16. It is a bijection of the 32-bit
words with a bias near the sampling floor, it is exact in integers (so the same on every device), and two multiplies
are all it costs. One hash of `key ^ counter` alone would give two names with nearby keys the same numbers in another
order; every counter is therefore hashed with one key, then again with a second one.

Tensors of counters are int32: torch multiplies them modulo 2^32, and the sign bit is just the 32nd bit. Where a hash
becomes a number it is read as such a signed word, plus 2^31: that is the unsigned word with its top bit inverted.
Everything is written out for another implementation, with test vectors, in docs/numerics.md.
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

# Normal values are made in blocks of this many, aligned on the parameter's flat index, whatever interval is asked
# for: a value then sits at the same place of a vector register in every layout, so vectorised functions cannot differ.
# One thread computes a block: each operation of many threads waits for all of them, and where other processes have the
# cores, that takes 50 times as long. So NumPy hashes, and torch has as many as its erfinv does not share out.
_BLOCK, _UNSHARED = 1 << 14, 1 << 11
_Words = TypeVar("_Words", Tensor, np.ndarray)


def _signed(word: int) -> int:
    """Return the int32 that has the bits of the unsigned 32-bit `word`."""
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
    shifted = x >> places  # of int32, so copies of the sign bit come in
    shifted &= _MASK >> places
    x ^= shifted
    return x


def derive_key(*words: int) -> int:
    """Return an unsigned 32-bit key made of any number of unsigned 64-bit words, each folded in as two halves."""
    key = 0
    for word in words:
        assert 0 <= word < 1 << 64, f"a key is made of unsigned 64-bit words, got {word}"
        for half in (word & _MASK, word >> 32):
            key = (mix_word(key ^ half) + _GOLDEN) & _MASK
    return key


def normal(seed: int, name: str, start: int, stop: int) -> Tensor:
    """Return standard normal values of the flat indices [start, stop) of a parameter: fp64, shape [stop - start].

    Each is sqrt(2) erfinv(2u - 1) with u = ((h xor 2^31) + 1/2) / 2^32 and h the hash of the index as an unsigned word,
    so values lie within 6.3 standard deviations and value i is the same whatever interval it is asked in.
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
        uniform = torch.from_numpy(x.astype(np.float64)).add_(2.0**31 + 0.5).mul_(2.0**-32)
        values = uniform.mul_(2.0).sub_(1.0)
        for part in values.split(_UNSHARED):
            part.erfinv_()
        values.mul_(math.sqrt(2.0))
        pieces.append(values[max(start - base, 0) : min(stop - base, _BLOCK)])
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.float64)


def keep_mask(key: int, sample_ids_B: Tensor, positions_S: Tensor, channels: Tensor, drop: float) -> Tensor:
    """Return which elements dropout keeps: bool [S, B, D].

    Args:
        key: `derive_key(seed, step, layer, site)`.
        sample_ids_B: int64 global sample ids.
        positions_S: int64 positions in the sequence (of this rank's part of it).
        channels: int64 [D], the hidden channels.
        drop: the probability to drop; an element is kept when h xor 2^31, with h its hash as an unsigned word, is at
            least drop x 2^32, rounded (half to even) and at most 2^32 - 1.
    """
    second = derive_key(key, 1)
    ids = (sample_ids_B ^ (sample_ids_B >> 32) * _GOLDEN).to(torch.int32)
    rows_B = mix_(ids + _signed(key))
    rows_SB = mix_(rows_B[None, :] ^ positions_S.to(torch.int32)[:, None])
    words = rows_SB[:, :, None] + channels.to(torch.int32) * _signed(_GOLDEN)
    words ^= _signed(second)
    # Signed words order as the unsigned ones with their top bit inverted do; the threshold is less by 2^31 for it.
    return mix_(words) >= min(round(drop * 2**32) - 2**31, 2**31 - 1)
