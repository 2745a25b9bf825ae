"""Allocate host memory, and copy a device's tensors to it and back.

On a GPU tensors kept on the host are in pinned memory, and copies have a stream of their own, so that they run in
parallel with the computation. On a CPU the host's memory *is* the device's, and a copy would gain nothing: `apart` is
False, and callers that offload check it first. With `apart` set to True on a CPU, every copy is made, in order, so that
tests and benchmarks can count what a GPU would send.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megazero.comm.home import Home
from megazero.comm.ledger import HOST, Ledger
from megazero.comm.pinned import pinned_bytes
from megazero.comm.streams import SideStream


class Host(Home):
    """The memory and threads of the host that a device belongs to.

    Args:
        device: the device that computes.
        ledger: counts memory (as host_CATEGORY) and, as axis "host", traffic.
        apart: the host's memory is not the device's; None: True unless the device is a CPU.
    """

    def __init__(self, device: torch.device, ledger: Ledger, apart: bool | None = None):
        self.apart = device.type != "cpu" if apart is None else apart
        self._pinned, self._ledger, self._stream = device.type == "cuda", ledger, SideStream(device)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, category: str) -> Tensor:
        """Return new, uninitialised host memory."""
        self._ledger.hold(f"host_{category}", math.prod(shape) * dtype.itemsize)
        if not self._pinned:
            return torch.empty(tuple(shape), dtype=dtype)
        return pinned_bytes(math.prod(shape) * dtype.itemsize).view(dtype).view(*shape)

    def zeros(self, numel: int, dtype: torch.dtype, category: str) -> Tensor:
        """Return new flat host memory filled with zeros."""
        return self.empty([numel], dtype, category).zero_()

    def send(self, x: Tensor, into: Tensor, purpose: str) -> None:
        """Start to copy x to the host. `x` may be freed at once, but must not be written to before `join`."""
        self._ledger.add(HOST, f"{purpose} out", x.numel(), x.element_size())
        with self._stream.queued():
            into.copy_(x, non_blocking=True)
        self._stream.keep(x)

    def bring(self, x: Tensor, into: Tensor, purpose: str) -> None:
        """Copy x from the host to the device, after all earlier sends; the current stream waits for it."""
        self._ledger.add(HOST, f"{purpose} back", x.numel(), x.element_size())
        with self._stream.queued():
            into.copy_(x, non_blocking=True)
        self._stream.join()

    def join(self) -> None:
        """Make the current stream wait for all sends: the tensors that were sent may be written to afterwards."""
        self._stream.join()

    def settle(self) -> None:
        """Wait until all sends have arrived."""
        self._stream.wait()
