"""Compute the learning rate of an update, as a pure function of its number.

An *update* is a step that changed the weights: steps minus skipped ones, counted from 0, as Adam counts them. A skipped
step therefore repeats the learning rate of the one before it, and a run that resumes needs no state beyond that count.

With peak P, minimum m, W warm-up updates and T updates in all, update u gets

    u < W       P (u + 1) / W                                      linear warm-up: the first update already moves
    cosine      m + (P - m) (1 + cos(pi x)) / 2                    Loshchilov & Hutter 2017 (SGDR), eq. 5, one cycle
    linear      m + (P - m) (1 - x)                                Devlin et al. 2019 (BERT), appendix A.2
    wsd         P until T - C, then linear to m in C updates       Hu et al. 2024 (MiniCPM), section 4.2
    constant    P

where x = (u - W + 1) / (T - W) runs over the updates after the warm-up and is 1 at u = T - 1: that update has exactly
the minimum. T is `run.steps`, or `schedule.steps`: a run that goes on with more steps keeps its course with the latter.
Warm-up and decay meet without a repeated value. Past T - 1 the last value stays.

A warm-up that is longer than the run is accepted (a short trial of a long run's config): the decay is never reached.
"""

import math
from dataclasses import dataclass
from typing import Literal

Decay = Literal["cosine", "linear", "wsd", "constant"]


@dataclass(frozen=True)
class LearningRate:
    """The schedule of the learning rate.

    Attributes:
        peak, minimum: learning rates.
        warmup, total, cooldown: lengths in updates; the cool-down is used by wsd only.
        decay: the shape after the warm-up.
    """

    peak: float
    minimum: float
    warmup: int
    total: int
    decay: Decay
    cooldown: int = 0

    def at(self, update: int) -> float:
        """Return the learning rate of an update, counted from 0 without skipped steps."""
        assert update >= 0, f"updates count from 0, got {update}"
        if update < self.warmup:
            return self.peak * ((update + 1) / self.warmup)
        start = max(self.warmup, self.total - self.cooldown) if self.decay == "wsd" else self.warmup
        # The two ends are returned, not computed: m + (P - m) is not always P in floating point.
        if self.decay == "constant" or update < start or start >= self.total:
            return self.peak
        done = (update - start + 1) / (self.total - start)  # of the decay, after this update
        if done >= 1.0:
            return self.minimum
        left = 0.5 * (1.0 + math.cos(math.pi * done)) if self.decay == "cosine" else 1.0 - done
        return min(self.peak, self.minimum + (self.peak - self.minimum) * left)  # rounding may add an ulp to the peak
