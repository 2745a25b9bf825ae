"""Dropout whose mask is computed where it is needed: fused, reference."""

from megazero.kernels.implementation import fused, specified

NAMES = ("bias_dropout_add", "dropout_backward")
CANDIDATES = (fused(*NAMES), specified(*NAMES))
