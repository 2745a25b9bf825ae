"""SwiGLU between its two projections and the third: fused, reference."""

from megazero.kernels.implementation import fused, specified

NAMES = ("swiglu", "swiglu_backward")
CANDIDATES = (fused(*NAMES), specified(*NAMES))
