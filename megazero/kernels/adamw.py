"""The update of fp32 masters that publishes 16-bit parameters in the same pass: fused, or nothing.

Without it torch's own fused AdamW runs, and a copy (`optim/adamw.py`); so it does for all other updates. apex's
FusedAdam would add nothing to that: it wants gradients in the parameters' dtype, scaled already, and counts updates on
the host.
"""

from megazero.kernels.implementation import KernelImplementation, fused

CANDIDATES = (fused("adamw_"), KernelImplementation("reference", {"adamw_": None}))
