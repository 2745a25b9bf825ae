"""Passes over flat memory: fused, reference."""

from megazero.kernels.implementation import fused, specified

NAMES = ("sum_of_squares", "accumulate_", "cast_")
CANDIDATES = (fused(*NAMES), specified(*NAMES))
