"""Compute the learning rate of an update, as a pure function of its number.

An *update* is a step that changed the weights; updates are counted from 0, without skipped steps, as in Adam. So the
step after a skipped one uses the same learning rate again, and a resumed run needs no state except this count.

With peak P, minimum m, W warm-up updates and T updates in total, update u has

    u < W       P (u + 1) / W, for piecewise times f(W)            linear warm-up, above 0 from the first update
    cosine      m + (P - m) (1 + cos(pi x)) / 2                    Loshchilov & Hutter 2017 (SGDR), eq. 5, one cycle
    linear      m + (P - m) (1 - x)                                Devlin et al. 2019 (BERT), appendix A.2
    wsd         P until T - C, then linear to m in C updates       Hu et al. 2024 (MiniCPM), section 4.2
    wsd-sqrt    the same with m + (P - m) (1 - sqrt(x))            Hägele et al. 2024, arXiv 2405.18392, section 3
    constant    P
    piecewise   P f, where f is linear between the given points (update, factor), and constant before and after them

where x = (u - W + 1) / (T - W) counts the updates after the warm-up (wsd: of the last C) and is 1 at u = T - 1: that
update has exactly the minimum. T is `schedule.steps`, else `run.steps`; with the former, a run extended to more steps
keeps its schedule. Warm-up and decay meet without a repeated value. After T - 1 the last value is kept.

A warm-up longer than the run is accepted (for a short trial of a long run's config); the decay is then never reached.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Decay = Literal["cosine", "linear", "wsd", "wsd-sqrt", "constant", "piecewise"]


@dataclass(frozen=True)
class LearningRate:
    """The schedule of the learning rate.

    Attributes:
        peak, minimum: learning rates.
        warmup, total, cooldown: lengths in updates; only wsd and wsd-sqrt use the cool-down.
        decay: the shape after the warm-up.
        points: (update, factor of the peak) for piecewise, at least one, in the order of updates.
    """

    peak: float
    minimum: float
    warmup: int
    total: int
    decay: Decay
    cooldown: int = 0
    points: Sequence[tuple[int, float]] = ()

    def at(self, update: int) -> float:
        """Return the learning rate of an update, counted from 0 without skipped steps."""
        assert update >= 0, f"updates count from 0, got {update}"
        if update < self.warmup:
            return self.peak * ((update + 1) / self.warmup) * (self._factor(self.warmup) if self.points else 1.0)
        if self.decay == "piecewise":
            return self.peak * self._factor(update)
        start = max(self.warmup, self.total - self.cooldown) if self.decay.startswith("wsd") else self.warmup
        # Return the two ends exactly: m + (P - m) is not always P in floating point.
        if self.decay == "constant" or update < start or start >= self.total:
            return self.peak
        done = (update - start + 1) / (self.total - start)  # fraction of the decay after this update
        if done >= 1.0:
            return self.minimum
        left = {"cosine": 0.5 * (1.0 + math.cos(math.pi * done)), "wsd-sqrt": 1.0 - math.sqrt(done)}.get(
            self.decay, 1.0 - done
        )
        return min(self.peak, self.minimum + (self.peak - self.minimum) * left)  # rounding may add an ulp to the peak

    def _factor(self, update: int) -> float:
        for (before, low), (after, high) in pairwise(self.points):
            if before <= update < after:
                return low + (high - low) * (update - before) / (after - before)
        first, last = self.points[0], self.points[-1]
        return first[1] if update < first[0] else last[1]
