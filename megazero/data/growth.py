"""The order of a source's windows when the source grows while a run trains: no window twice in a pass.

A source begins with N_0 windows and has N_k from its number c_k on (numbers count the samples that it gives); windows
keep their numbers, new ones come behind. What is left of the pass that is under way then, r_k windows, and the new ones
are one pass, mixed; behind it come passes of all N_k. So each window comes once in a pass, whenever it was added:

    numbers of generation k     c_k ... c_(k+1)
    its first pass              r_k + N_k - N_(k-1) numbers, in an order of its own; element e < r_k is what generation
                                k - 1 would have read at its number c_k + e, another one is new window e - r_k
    further passes              N_k numbers each

All of it is arithmetic on the permutation of sampler.py; nothing is stored, and a number costs a look-up a generation.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from megazero.data.sampler import position_of, window_of


class Generation(NamedTuple):
    """The size of a source from one of its numbers on.

    Attributes:
        first: the number.
        windows: how many it has, at least as many as before.
    """

    first: int
    windows: int


class GrowingOrder:
    """The order of a growing source: a window for each number.

    Args:
        generations: by their first numbers, of which the first is 0.
        seeds: of the orders, one for each generation; the first is that of a source that does not grow.
    """

    def __init__(self, generations: Sequence[Generation], seeds: Sequence[int]):
        self._firsts = np.array([each.first for each in generations], np.int64)
        self._windows, self._seeds = [each.windows for each in generations], list(seeds)
        assert self._firsts[0] == 0 and (np.diff(self._firsts) >= 0).all() and (np.diff(self._windows) >= 0).all()
        self._left = [0]  # r_k
        self._pass = [self._windows[0]]  # numbers of the first pass of each generation
        for k in range(1, len(generations)):
            first = int(self._firsts[k])
            self._left.append(self._end_of_pass(k - 1, first) - first)
            self._pass.append(self._left[k] + self._windows[k] - self._windows[k - 1])

    def window_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return the windows of numbers, int64 of their shape."""
        found = np.empty_like(numbers)
        which = np.searchsorted(self._firsts, numbers, side="right") - 1
        for k in np.unique(which).tolist():
            own = which == k
            found[own] = self._of(k, numbers[own])
        return found

    def numbers_of(self, window: int, end: int) -> Iterator[int]:
        """Yield the numbers below `end` that are a window, rising."""
        for k, windows in enumerate(self._windows):
            first, stop = int(self._firsts[k]), min(end, self._end(k))
            if window >= windows or stop <= first:
                continue
            passes = 1 + max(0, -(-(stop - first - self._pass[k]) // windows))
            found = (self._number(k, window, number) for number in range(passes))
            yield from (number for number in found if number is not None and first <= number < stop)

    def _end(self, k: int) -> int:
        return int(self._firsts[k + 1]) if k + 1 < len(self._firsts) else 2**63

    def _end_of_pass(self, k: int, number: int) -> int:
        """Return where the pass of generation k ends that is under way at a number; at its last one that one."""
        first = int(self._firsts[k]) + self._pass[k]
        return first + max(0, -(-(number - first) // self._windows[k])) * self._windows[k]

    def _of(self, k: int, numbers: np.ndarray) -> np.ndarray:
        """Return the windows that numbers, not before generation k, would be in it."""
        first, size = int(self._firsts[k]), self._pass[k]
        found, places = np.empty_like(numbers), numbers - first
        early = places < size
        if not early.all():  # in passes from the second on
            later = places[~early] - size + self._windows[k]
            found[~early] = window_of(later, self._windows[k], self._seeds[k])
        if early.any():
            elements = window_of(places[early], size, self._seeds[k])
            found[early] = elements if k == 0 else self._elements(k, elements)
        return found

    def _elements(self, k: int, elements: np.ndarray) -> np.ndarray:
        """Return the windows of elements of the first pass of a generation behind the first."""
        left = self._left[k]
        found = elements - left + self._windows[k - 1]
        old = elements < left
        if old.any():
            found[old] = self._of(k - 1, elements[old] + self._firsts[k])
        return found

    def _number(self, k: int, window: int, number: int) -> int | None:
        """Return where a window is in a pass of generation k, counted from 0; None: it came in an earlier one."""
        first, size, windows = int(self._firsts[k]), self._pass[k], self._windows[k]
        if number:
            return first + size - windows + position_of(window, number, windows, self._seeds[k])
        if k == 0:
            return position_of(window, 0, windows, self._seeds[0])
        element = self._element(k, window)
        return None if element is None else first + position_of(element, 0, size, self._seeds[k])

    def _element(self, k: int, window: int) -> int | None:
        """Return which element of the first pass of a generation is a window; None: it was read before."""
        left, before = self._left[k], self._windows[k - 1]
        if window >= before:
            return left + window - before
        if not left:
            return None
        start = int(self._firsts[k - 1]) + self._pass[k - 1]
        ends = int(self._firsts[k]) + left
        under_way = (ends - start) // before  # the pass of generation k - 1 that is under way
        place = self._number(k - 1, window, under_way)
        return None if place is None or place < self._firsts[k] else place - int(self._firsts[k])
