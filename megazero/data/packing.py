"""Pack whole documents into windows (`data.pack`): only one longer than a window is cut; a window ends in padding.

First-fit decreasing: documents are placed by decreasing length, each into the first window that has room for it. This
is equal to filling one window after the other, always with the longest remaining document that fits; documents of equal
length are taken in file order. So the contents of the windows follow from the number of documents of each length, and
windows with the same lengths come in rows: a row is computed once, however many windows it has. First-fit decreasing
needs at most 11/9 of the fewest possible windows, plus 6/9. Source: G. Dosa, The Tight Bound of First Fit Decreasing
Bin-Packing Algorithm, ESCAPE 2007.

The windows depend on the lengths alone: they are the same on every rank and for every seed, which changes only their
order. Memory holds one int per document, and the rows, a few for each different length.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np

SHORTEST = 2  # tokens: a single token has no target


@dataclass(frozen=True)
class _Row:
    """Consecutive windows that hold documents of the same lengths.

    Attributes:
        first, count: the number of the first window, and how many there are.
        held: for each length (documents of it in each window, index of the row's first one among all documents, sorted
            by length).
    """

    first: int
    count: int
    held: tuple[tuple[int, int], ...]


class Packing:
    """The assignment of documents to windows.

    Args:
        lengths: tokens of each document, int64.
        size: tokens of a window. Of a longer document the first `size` tokens are taken.

    Attributes:
        num_windows: the number of windows; 0 if no document has SHORTEST tokens.
        num_cut: documents that are longer than a window.
        fill: the share of the windows' tokens that is text.
    """

    def __init__(self, lengths: np.ndarray, size: int):
        taken = np.minimum(lengths, size)
        self._by_length = np.argsort(taken, kind="stable")  # equal ones in file order
        counts = np.bincount(taken, minlength=size + 1)
        places = np.cumsum(counts) - counts  # of the first document of each length
        counts[:SHORTEST] = 0
        self.num_cut = int((lengths > size).sum())
        self._rows = _rows(counts, places, size)
        self._firsts = np.array([row.first for row in self._rows], np.int64)
        self.num_windows = self._rows[-1].first + self._rows[-1].count if self._rows else 0
        self.fill = int(taken[taken >= SHORTEST].sum()) / (self.num_windows * size) if self.num_windows else 0.0

    def documents(self, window: int) -> list[int]:
        """Return the documents of a window, by decreasing length, as indices into `lengths`."""
        assert 0 <= window < self.num_windows
        row = self._rows[int(np.searchsorted(self._firsts, window, side="right")) - 1]
        found: list[int] = []
        for each, place in row.held:
            begin = place + (window - row.first) * each
            found += self._by_length[begin : begin + each].tolist()
        return found


def _rows(counts: np.ndarray, places: np.ndarray, size: int) -> list[_Row]:
    """Return the rows for `counts[i]` documents of each length i, the first at `places[i]` in the order of lengths."""
    left = {length: int(counts[length]) for length in np.flatnonzero(counts).tolist()}
    lengths, place = list(left), {length: int(places[length]) for length in left}  # lengths ascend
    rows: list[_Row] = []
    first = 0
    while lengths:
        room, below, held = size, len(lengths), list[tuple[int, int]]()
        while (at := min(below, bisect_right(lengths, room)) - 1) >= 0:
            length = lengths[at]
            each = min(left[length], room // length)
            held.append((length, each))
            room, below = room - each * length, at
        count = min(left[length] // each for length, each in held)
        rows.append(_Row(first, count, tuple((each, place[length]) for length, each in held)))
        first += count
        for length, each in held:
            left[length] -= each * count
            place[length] += each * count
            if not left[length]:
                del lengths[bisect_left(lengths, length)]
    return rows
