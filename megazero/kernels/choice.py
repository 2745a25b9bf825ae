"""Which implementation a run uses: `precision.kernels` auto | fused | reference.

Decided once from the declared device and dtype, never from a tensor, and said once in the log. `auto` takes fused
kernels where they exist and can be built (today: on the CPU, with g++; in 16 bits that of the update only), and the
reference otherwise; `fused` insists.
"""

import logging

import torch

from megazero.errors import UserError
from megazero.kernels import cpu
from megazero.kernels.build import BuildError
from megazero.kernels.operations import REFERENCE, WIDE_REFERENCE, Operations

_LOG = logging.getLogger("megazero")


def for_host(preference: str, dtype: torch.dtype) -> Operations:
    """The same choice for what the host computes beside a GPU: an update."""
    return choose("reference" if preference == "reference" else "auto", torch.device("cpu"), dtype)


def choose(preference: str, device: torch.device, dtype: torch.dtype) -> Operations:
    """The operations for a run on `device` with parameters of `dtype`.

    Raises:
        UserError: 114, "fused" was asked for and cannot be had.
    """
    chosen, reason = REFERENCE if device.type == "cpu" else WIDE_REFERENCE, "asked for"
    if preference in ("auto", "fused"):
        if device.type != "cpu" or dtype == torch.float64:
            reason = f"fused kernels exist for fp32 and 16 bits on the CPU, not for {dtype} on {device.type}"
        else:
            try:
                chosen, reason = cpu.fused_operations(dtype), "built with g++"
            except BuildError as error:
                reason = str(error)
    if preference == "fused" and chosen.name != "fused":
        raise UserError(114, reason, "use precision.kernels=auto", where="precision.kernels=fused")
    _LOG.info("kernels: %s (%s)", chosen.name, reason)
    return chosen
