"""Convert decimal weights to integers with exactly equal proportions."""

from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm

MOST_PERIOD = 1_000_000  # samples of a period, whose order is kept in memory


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Return the smallest integers with the proportions of weights > 0; each float counts as the decimal it prints as.

    0.7, 0.2 and 0.1 give 7, 2 and 1, though no float is exactly 0.7.
    """
    exact = [Fraction(repr(weight)) for weight in weights]
    common = lcm(*(each.denominator for each in exact))
    whole = [int(each * common) for each in exact]
    return [each // gcd(*whole) for each in whole]
