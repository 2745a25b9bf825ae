"""Compare the times of systems: ratios within a round, one value per launch, and an interval over launches.

Timings vary in three ways: from step to step, over minutes, and from one start of the processes to the next (placement
of memory and threads). Ratios are taken within a round, which removes the variation over minutes. The median over the
rounds of a launch removes that of single steps. The variation between launches shows only in several launches. So each
launch gives one value, the median of its ratios, and the result is their geometric mean with the 95 % interval of
Student's t. With three launches that interval is wide, as it should be.
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
    """A ratio of times with its 95 % interval over launches; with one launch the interval is infinite."""

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
    """Return the geometric mean of positive values, one per launch, with its 95 % interval."""
    logs = [math.log(value) for value in values]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return Ratio(math.exp(mean), 0.0, math.inf)
    freedom = len(logs) - 1
    t = _T95[freedom - 1] if freedom <= len(_T95) else _NORMAL95 + 2.65 / freedom
    half = t * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def spread(launches: Sequence[Rounds], name: str) -> float:
    """Return the spread of single steps in all launches: interquartile range of their seconds over the median.

    With a single step: 0.
    """
    seconds = [second for rounds in launches for second in rounds[name]]
    if len(seconds) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(seconds, n=4)
    return (high - low) / middle


def seconds(launches: Sequence[Rounds], name: str) -> float:
    """Return the median seconds of a call over all launches."""
    return statistics.median(second for rounds in launches for second in rounds[name])
