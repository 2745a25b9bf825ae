"""Compare the times of systems: ratios within a round, one value a launch, and an interval over launches.

Machines are noisy in three ways: from one step to the next, over minutes, and from one start of the processes to the
next (where memory is, which core a thread got). Ratios are paired within a round, which takes out the minutes; the
median over a launch's rounds takes out single steps; what differs between launches is seen only by launching again. So
the unit is the launch: of each, the median of the paired ratios; over launches the mean of their logarithms, with the
95 % interval of Student's t. With three launches that interval is wide, and it should be.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Two-sided 95 % quantiles of Student's t by degrees of freedom.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_NORMAL95 = 1.960

Rounds = Mapping[str, Sequence[float]]  # of one launch: seconds of each call by name, in the order of the rounds


@dataclass(frozen=True)
class Ratio:
    """A ratio of times with its 95 % interval over launches; of one launch the interval is infinitely wide."""

    value: float
    low: float
    high: float


def ratio(launches: Sequence[Rounds], name: str, reference: str, divide_by: int = 1) -> Ratio:
    """Return the ratio of a call's time to the reference's.

    Args:
        divide_by: the denominator is the reference's seconds / divide_by. With a reference of one process and systems
            of n ranks, divide_by = n makes 1.00 the perfect division of its work.
    """
    medians = []
    for rounds in launches:
        pairs = zip(rounds[name], rounds[reference], strict=True)
        medians.append(statistics.median(mine * divide_by / theirs for mine, theirs in pairs))
    return interval(medians)


def interval(values: Sequence[float]) -> Ratio:
    """Return the geometric mean of positive values, one of each launch, with its 95 % interval."""
    logs = [math.log(value) for value in values]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return Ratio(math.exp(mean), 0.0, math.inf)
    freedom = len(logs) - 1
    t = _T95[freedom - 1] if freedom <= len(_T95) else _NORMAL95 + 2.65 / freedom
    half = t * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def spread(launches: Sequence[Rounds], name: str) -> float:
    """Return how far single steps lie apart: the interquartile range of their seconds over the median, all launches.

    Of a single step: 0.
    """
    seconds = [second for rounds in launches for second in rounds[name]]
    if len(seconds) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(seconds, n=4)
    return (high - low) / middle


def seconds(launches: Sequence[Rounds], name: str) -> float:
    """Return the median over all launches."""
    return statistics.median(second for rounds in launches for second in rounds[name])
