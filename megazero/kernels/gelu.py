"""GELU of a sum with a bias: fused, reference."""

from megazero.kernels.implementation import fused, specified

NAMES = ("bias_gelu", "bias_gelu_backward")
CANDIDATES = (fused(*NAMES), specified(*NAMES))
