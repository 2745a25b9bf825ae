"""Turn weights as people write them into whole numbers of the same proportions, exactly."""

from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm

MOST_PERIOD = 1_000_000  # samples of a period: the order of one is held in memory


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Return the smallest whole numbers in the proportions of weights > 0, each taken as the decimal that it prints as.

    0.7, 0.2 and 0.1 are 7, 2 and 1, though no float is exactly 0.7.
    """
    exact = [Fraction(repr(weight)) for weight in weights]
    common = lcm(*(each.denominator for each in exact))
    whole = [int(each * common) for each in exact]
    return [each // gcd(*whole) for each in whole]
