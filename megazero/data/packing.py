"""Pack whole documents into windows (`data.pack`): none is cut by a window's end, and a window ends in padding.

First-fit decreasing: documents go by falling length, each into the first window that has room for it. That is the same
as filling one window after the other, always with the longest document that is left and fits, and documents of equal
length are alike, taken in file order. So what is in a window follows from how many documents of each length there are,
and windows with the same lengths come in rows: a row is found once, however many windows it has. First-fit decreasing
needs at most 11/9 of the fewest possible windows, and 6/9 of one. Source: G. Dosa, The Tight Bound of First Fit
Decreasing Bin-Packing Algorithm, ESCAPE 2007.

It is a function of the lengths alone: every rank and every seed has the same windows, in an order of its own. Held in
memory are one int a document, and the rows, of which there are some for each different length.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np

SHORTEST = 2  # tokens: one alone has no target


@dataclass(frozen=True)
class _Row:
    """Windows, one after the other, that hold documents of the same lengths.

    Attributes:
        first, count: their numbers, from `first` on.
        held: of each length (how many documents a window has of it, place of the first among those ordered by length).
    """

    first: int
    count: int
    held: tuple[tuple[int, int], ...]


class Packing:
    """Which documents are in which window.

    Args:
        lengths: tokens of each document, int64.
        size: tokens of a window. Of a longer document the first `size` tokens are taken.

    Attributes:
        num_windows: windows; 0 where no document has SHORTEST tokens.
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
        text = int(taken[taken >= SHORTEST].sum())
        self.fill = text / (self.num_windows * size) if self.num_windows else 0.0

    def documents(self, window: int) -> list[int]:
        """Return the documents of a window, by falling length: places among those of `lengths`."""
        assert 0 <= window < self.num_windows
        row = self._rows[int(np.searchsorted(self._firsts, window, side="right")) - 1]
        found: list[int] = []
        for each, place in row.held:
            begin = place + (window - row.first) * each
            found += self._by_length[begin : begin + each].tolist()
        return found


def _rows(counts: np.ndarray, places: np.ndarray, size: int) -> list[_Row]:
    """Return the windows of so many documents of each length (int64 [size + 1]), the first of which are at `places`."""
    left = {length: int(counts[length]) for length in np.flatnonzero(counts).tolist()}
    lengths, place = list(left), {length: int(places[length]) for length in left}  # lengths rise
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
