"""Any documents of a data set, for a stream of them."""

import numpy as np


class Chosen:
    """The choice of some documents by their numbers, which rise."""

    def __init__(self, numbers: np.ndarray | list[int]):
        self._numbers = np.asarray(numbers, np.int64)
        self.name = "some"

    def numbers(self, first: int, stop: int) -> np.ndarray:
        begin, end = np.searchsorted(self._numbers, (first, stop))
        return self._numbers[begin:end]
