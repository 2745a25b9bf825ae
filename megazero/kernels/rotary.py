"""Rotary positions: fused, reference."""

from megazero.kernels.candidate import fused, specified

NAMES = ("rotary",)
CANDIDATES = (fused(*NAMES), specified(*NAMES))
