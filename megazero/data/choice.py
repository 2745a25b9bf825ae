"""Choose documents by their numbers: one side of the split into training and validation."""

import numpy as np

from megazero.base.errors import UserError

_WORD = np.uint64(0xFFFFFFFF)
_GOLDEN = np.uint64(0x9E3779B9)  # mix(0) is 0: without an offset document 0 would always be for validation


def mix(x: np.ndarray) -> np.ndarray:
    """Return a 32-bit hash of 32-bit words held in uint64: two multiplications, three xor-shifts.

    The constants are the low-bias "lowbias32" of C. Wellons (hash-prospector). It is a bijection of the 32-bit words.
    """
    x = (x ^ (x >> np.uint64(16))) * np.uint64(0x7FEB352D) & _WORD
    x = (x ^ (x >> np.uint64(15))) * np.uint64(0x846CA68B) & _WORD
    return x ^ (x >> np.uint64(16))


class Side:
    """The validation side of a split of documents if `valid`, else the training side.

    Document i is for validation if hash(i) / 2^32 < fraction.

    Raises:
        UserError: 206 if the fraction is not between 0 and 1.
    """

    def __init__(self, fraction: float, *, valid: bool):
        if not 0 < fraction < 1:
            raise UserError(206, f"expected a validation fraction between 0 and 1, got {fraction}", "set data.valid")
        self._valid, self._limit = valid, np.uint64(round(fraction * 2**32))

    def numbers(self, first: int, stop: int) -> np.ndarray:
        """Return the numbers of the chosen documents in [first, stop): int64, ascending."""
        words = np.arange(first, stop, dtype=np.uint64)
        hashes = mix(mix(words & _WORD ^ _GOLDEN) ^ (words >> np.uint64(32)))
        return first + np.flatnonzero((hashes < self._limit) == self._valid)
