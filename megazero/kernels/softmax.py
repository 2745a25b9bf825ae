"""The causal softmax, where no flash kernel runs: fused, reference."""

from megazero.kernels.implementation import fused, specified

NAMES = ("causal_softmax", "causal_softmax_backward")
CANDIDATES = (fused(*NAMES), specified(*NAMES))
