"""Recognise steps whose gradient norm is far above the usual one, before their update.

A step is a spike if its norm, before clipping, exceeds `factor` times the median of the last 128 finite steps. The host
of every rank knows this median when it issues the update, and checkpoints hold the norms. So all ranks and a resumed
run judge alike. Spikes count too: half a window after a lasting change of level nothing is a spike any more.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from statistics import median

_WINDOW, _LEAST = 128, 32  # steps whose norms are kept, and that are needed for a median


class Spikes:
    """The gradient norms of the last steps.

    Args:
        skips: steps that are spikes do not update.
        say: reports a spike; called on every rank.

    Attributes:
        norms: of the last steps, for a checkpoint.
        count: the number of spikes of the run so far.
    """

    def __init__(self, factor: float, *, skips: bool, say: Callable[[str], object]):
        self._factor, self._skips, self._say = factor, skips, say
        self.norms = deque[float](maxlen=_WINDOW)
        self.count = 0

    @property
    def bound(self) -> float:
        """Return the norm from which on the next step does not update; infinity: any norm may."""
        return self._limit if self._skips else math.inf

    @property
    def _limit(self) -> float:
        return self._factor * median(self.norms) if len(self.norms) >= _LEAST else math.inf

    def begin(self, norms: Iterable[float], count: int) -> None:
        """Continue from a checkpoint."""
        self.norms.extend(norms)
        self.count = count

    def add(self, step: int, norm: float) -> None:
        """Add the norm of the next step, if it is finite; report a spike. `step` counts from 1."""
        if not math.isfinite(norm):
            return
        if norm > self._limit:
            self.count += 1
            usual = f"{norm / median(self.norms):.3g} times the median of the last {len(self.norms)} steps"
            self._say(f"step {step}: gradient norm {norm:.4g} is {usual}" + "; not updated" * self._skips)
        self.norms.append(norm)
