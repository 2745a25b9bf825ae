"""Say where documents begin in a token file, without holding it in memory: 10^9 documents are 8 GB of offsets.

Offsets are read from the file where they are asked for. They rise, so the document of a token is found by binary
search: some twenty reads of eight bytes, then one of a few thousand offsets. What is read is held against its bounds
each time, because a file may have changed since it was checked. Of few documents the offsets are held instead.
"""

from abc import ABC, abstractmethod
from typing import overload

import numpy as np

from megazero.base.errors import UserError

HELD = 1 << 16  # documents of which the offsets are held in memory
_AT_ONCE = 1 << 12  # offsets that are read when a search is near
_SPAN = 1 << 20  # elements that one read may have


class DocumentOffsets(ABC):
    """The token offset at which each document begins, and behind them where the last one ends.

    Args:
        num_documents: of the file.
        num_tokens: of the file, the last offset.
    """

    def __init__(self, num_documents: int, num_tokens: int):
        self.num_documents, self.num_tokens = num_documents, num_tokens

    def __len__(self) -> int:
        return self.num_documents + 1

    @overload
    def __getitem__(self, which: int) -> int: ...
    @overload
    def __getitem__(self, which: slice | np.ndarray) -> np.ndarray: ...
    def __getitem__(self, which: int | slice | np.ndarray) -> int | np.ndarray:
        """Return the offset of a document, those of a slice without steps, or those of rising int64 numbers."""
        if isinstance(which, slice):
            first, stop, step = which.indices(len(self))
            assert step == 1, "offsets are read in one piece"
            return self._within(first, max(first, stop))
        if isinstance(which, np.ndarray):
            return self._scattered(which)
        assert 0 <= which < len(self)
        return int(self._within(which, which + 1)[0])

    def find(self, token: int) -> int:
        """Return the document that holds the token at this index of the file."""
        assert 0 <= token < self.num_tokens
        low, high = 0, self.num_documents  # the document is in [low, high)
        while high - low > _AT_ONCE:
            middle = (low + high) // 2
            low, high = (middle, high) if self[middle] <= token else (low, middle)
        return low + int(np.searchsorted(self[low : high + 1], token, side="right")) - 1

    @abstractmethod
    def _read(self, first: int, stop: int) -> np.ndarray:
        """Return offsets [first, stop), int64, whatever they are."""

    @abstractmethod
    def _refuse(self, what: str) -> UserError:
        """Return the error for offsets that cannot be."""

    def _within(self, first: int, stop: int) -> np.ndarray:
        found = self._read(first, stop)
        if len(found) and (found[0] < 0 or found[-1] > self.num_tokens or (np.diff(found) < 0).any()):
            what = f"expected rising offsets of at most {self.num_tokens:,} tokens for documents {first:,} to {stop:,}"
            raise self._refuse(f"{what}, got {found.min():,} to {found.max():,}")
        return found

    def _scattered(self, which: np.ndarray) -> np.ndarray:
        if not len(which):
            return np.empty(0, np.int64)
        first, span = int(which[0]), int(which[-1] - which[0]) + 1
        if span <= min(_SPAN, 64 * len(which)):
            return self._within(first, first + span)[which - first]
        return np.array([self[number] for number in which.tolist()], np.int64)


class HeldOffsets(DocumentOffsets):
    """Offsets in memory, int64 [documents + 1], found to rise."""

    def __init__(self, offsets: np.ndarray):
        super().__init__(len(offsets) - 1, int(offsets[-1]))
        self._offsets = offsets
        self._offsets.flags.writeable = False

    def _read(self, first: int, stop: int) -> np.ndarray:
        return self._offsets[first:stop]

    def _within(self, first: int, stop: int) -> np.ndarray:
        return self._offsets[first:stop]

    def _refuse(self, what: str) -> UserError:
        raise AssertionError(what)


def held(offsets: DocumentOffsets, *, many_files: bool) -> DocumentOffsets:
    """Return the same offsets in memory, where that is little.

    Args:
        many_files: the file is one of so many that they would add up.
    """
    return offsets if many_files or offsets.num_documents > HELD else HeldOffsets(offsets[:].astype(np.int64))
