"""The families of operations, and which implementations each has.

A run chooses one implementation for a whole family (`select.py`), because its operations belong together: forward and
backward of one pair must agree on what the forward keeps.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from megazero.kernels import apex, reference, schema

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KERNEL_DEVICES = ("cpu", "cuda")  # that there are libraries of ours for


@dataclass(frozen=True)
class KernelImplementation:
    """One implementation of a family.

    Attributes:
        name: "fused", "apex" or "reference".
        operations: a callable with the schema's arguments for each operation of the family; None where torch's own
            optimizer does the work.
        devices, dtypes: of the tensors that it takes, whatever their shapes; None: any.
    """

    name: str
    operations: Mapping[str, Callable[..., object] | None]
    devices: tuple[str, ...] | None = None
    dtypes: tuple[torch.dtype, ...] | None = None

    def takes(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return True if this implementation takes tensors of this device and dtype."""
        return (self.devices is None or device.type in self.devices) and (self.dtypes is None or dtype in self.dtypes)


Family = tuple[KernelImplementation, ...]


def _fused(*names: str) -> KernelImplementation:
    """Return our own kernels, which a compiled library holds."""
    library = getattr(torch.ops, schema.NAMESPACE)
    return KernelImplementation(
        "fused", {name: getattr(library, name) for name in names}, KERNEL_DEVICES, KERNEL_DTYPES
    )


def _family(*names: str, other: KernelImplementation | None = None) -> Family:
    """Return the family of these operations: our kernels, another implementation if there is one, the specification."""
    specified = KernelImplementation("reference", {name: getattr(reference, name) for name in names})
    return (_fused(*names), specified) if other is None else (_fused(*names), other, specified)


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "norm": _family(
            *("layer_norm", "layer_norm_backward", "rms_norm", "rms_norm_backward"),
            other=KernelImplementation("apex", apex.NORMS, ("cuda",), KERNEL_DTYPES),
        ),
        # apex has no norm of a sum: the sum is then a pass of its own, as in the reference.
        "norm of a sum": _family("add_layer_norm", "add_layer_norm_backward", "add_rms_norm", "add_rms_norm_backward"),
        "gelu": _family("bias_gelu", "bias_gelu_backward"),
        "swiglu": _family("swiglu", "swiglu_backward"),
        "dropout": _family("dropout_add", "dropout_backward"),
        "rotary": _family("rotary"),
        "cross entropy": _family("cross_entropy_parts_", "cross_entropy_backward_"),
        "flat": _family("sums_of_squares", "accumulate_", "cast_"),
        "quantized": _family("quantize_", "dequantize_"),
        # The update of fp32 masters that publishes 16-bit parameters in the same pass. Without it torch's own fused
        # AdamW runs, and a copy (`optim/adamw.py`); so it does for all other updates. apex's FusedAdam would add
        # nothing: it wants gradients in the parameters' dtype, scaled already, and counts updates on the host.
        "adamw": (_fused("adamw_"), KernelImplementation("reference", {"adamw_": None})),
    }
)
