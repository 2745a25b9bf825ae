"""Compile the specification with torch.compile, for `precision.kernels=compile`: norms and elementwise operations.

Dropout is not among them: its key is a number that differs in every call, so each call would be compiled again.
"""

import shutil
from collections.abc import Callable

import torch

from megazero.base.packages import is_installed
from megazero.kernels import reference

_FORWARD = ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm", "bias_gelu", "swiglu")
NAMES = (*_FORWARD, *(f"{name}_backward" for name in _FORWARD), "rotary")


def lacking(device: torch.device) -> str:
    """Return why torch.compile cannot work on a device here; "" if it can."""
    if device.type == "cuda":
        return "" if is_installed("triton") else "torch.compile needs triton, which is not installed"
    return "" if shutil.which("g++") else "torch.compile needs g++, and there is none on the PATH"


def operations() -> dict[str, Callable[..., object]]:
    """Return the operations; each is compiled at its first call, which takes some seconds.

    After torch's limit of compilations, for many shapes, an operation runs as plain torch.
    """
    options: dict[str, str | int | bool | Callable] = {"emulate_precision_casts": True}  # else norms round only once
    return {name: torch.compile(getattr(reference, name), options=options) for name in NAMES}
