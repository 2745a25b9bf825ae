"""Choose the source of each sample of a mixture, so evenly that every prefix has its share of each source.

With integer weights w_k, whose sum is the period P, source k has given c_k(n) of the first n samples, and

    |c_k(n) - n w_k / P| < 1        for every source and every n

For the j-th sample of source k (from 0), this means a first and a last slot: floor(j P / w_k) and
ceil((j + 1) P / w_k) - 1. Samples are jobs of one slot each: to schedule, of all jobs that may run, the one with the
earliest deadline meets all deadlines if any order does (Jackson 1955; slots as in Baruah, Cohen, Plaxton and Varvel,
Proportionate Progress, Algorithmica 1996). Such an order exists: R. Tijdeman, The Chairman Assignment Problem, Discrete
Mathematics 1980. After P samples every source has given exactly w_k, and the order repeats. So one period is computed
once and kept; the source of any sample is then found by two look-ups.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np


class Interleaving:
    """The order in which sources give samples.

    Args:
        weights: integers, the samples of a period that each source gives; all 0: the order has no samples. The
            constructor takes O(sum of weights).

    Attributes:
        weights: the weights, int64 [sources].
        period: their sum.
    """

    def __init__(self, weights: Sequence[int]):
        self.weights = np.array(weights, np.int64)
        self.period = int(self.weights.sum())
        self._sources = _one_period([int(weight) for weight in weights])  # [P]
        # The slots sorted by source; then, for each slot, its place among the slots of its source.
        slots = np.argsort(self._sources, kind="stable")
        firsts = np.cumsum(self.weights) - self.weights
        self._places = np.empty(self.period, np.int64)
        self._places[slots] = np.arange(self.period) - np.repeat(firsts, self.weights)

    def of(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (source, number of the sample among that source's, from 0) of samples, int64 of their shape."""
        periods, slots = np.divmod(samples, self.period)
        sources = self._sources[slots]
        return sources, periods * self.weights[sources] + self._places[slots]

    def counts(self, samples: int) -> np.ndarray:
        """Return how many of the first `samples` samples come from each source, int64 [sources]."""
        periods, rest = divmod(samples, self.period or 1)
        return periods * self.weights + np.bincount(self._sources[:rest], minlength=len(self.weights))


def _one_period(weights: Sequence[int]) -> np.ndarray:
    """Return the source of each slot of a period, int64 [sum of weights]."""
    period = sum(weights)
    early: list[tuple[int, int, int]] = []  # (first slot, source, number) of samples that may not come yet
    ready: list[tuple[int, int, int]] = []  # (slot before which it must come, source, number)
    for source in np.flatnonzero(weights).tolist():
        heappush(early, (0, source, 0))
    order = np.empty(period, np.int64)
    for slot in range(period):
        while early and early[0][0] <= slot:
            _, source, number = heappop(early)
            heappush(ready, (-(-(number + 1) * period // weights[source]), source, number))
        end, source, number = heappop(ready)
        assert slot < end, "Tijdeman 1980"
        order[slot] = source
        if number + 1 < weights[source]:
            heappush(early, ((number + 1) * period // weights[source], source, number + 1))
    return order
