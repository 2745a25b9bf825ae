"""Who offers an operation family, and for what: the value that the files of the families are made of."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from megazero.kernels import reference, schema

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KERNEL_DEVICES = ("cpu", "cuda")  # that there are libraries of ours for


@dataclass(frozen=True)
class KernelImplementation:
    """One implementation of a family.

    Attributes:
        name: "fused", "apex" or "reference".
        operations: of each operation of the family a callable with the schema's arguments, None where torch's own
            optimizer does it.
        devices, dtypes: of tensors that it takes, whatever their shapes; None: any.
    """

    name: str
    operations: Mapping[str, Callable[..., object] | None]
    devices: tuple[str, ...] | None = None
    dtypes: tuple[torch.dtype, ...] | None = None

    def takes(self, device: torch.device, dtype: torch.dtype) -> bool:
        return (self.devices is None or device.type in self.devices) and (self.dtypes is None or dtype in self.dtypes)


def fused(*names: str) -> KernelImplementation:
    """Ours, of a compiled library."""
    library = getattr(torch.ops, schema.NAMESPACE)
    return KernelImplementation(
        "fused", {name: getattr(library, name) for name in names}, KERNEL_DEVICES, KERNEL_DTYPES
    )


def specified(*names: str) -> KernelImplementation:
    """The specification itself."""
    return KernelImplementation("reference", {name: getattr(reference, name) for name in names})
