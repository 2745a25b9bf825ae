"""Rotary positions: fused, reference."""

from megazero.kernels.implementation import fused, specified

NAMES = ("rotary",)
CANDIDATES = (fused(*NAMES), specified(*NAMES))
