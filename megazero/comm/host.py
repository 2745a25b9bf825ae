"""The host's memory beside the device's, and the way there and back.

On a GPU what rests on the host lies in pinned memory, and copies have a queue of their own, so that they run beside
the computation. On a CPU the host's memory *is* the device's, and moving anything there would be a copy to nowhere:
`apart` says so, and whoever offloads asks it first. A host that is declared apart on a CPU makes every copy, in order;
tests and benchmarks count what a GPU would send.
"""

import math
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

import torch
from torch import Tensor

from megazero.comm.ledger import HOST, Ledger
from megazero.comm.streams import SideStream


class Host:
    """
    Args:
        device: that computes.
        ledger: told of memory (as host_CATEGORY) and, as axis "host", of what is sent.
        apart: the host's memory is not the device's; None: as it is.
    """

    def __init__(self, device: torch.device, ledger: Ledger, apart: bool | None = None):
        self.apart = device.type != "cpu" if apart is None else apart
        self._pinned, self._ledger, self._stream = device.type == "cuda", ledger, SideStream(device)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, category: str) -> Tensor:
        """New memory of the host, with anything in it."""
        self._ledger.hold(f"host_{category}", math.prod(shape) * dtype.itemsize)
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=self._pinned)

    def zeros(self, numel: int, dtype: torch.dtype, category: str) -> Tensor:
        """The same, flat, with zeros in it."""
        return self.empty([numel], dtype, category).zero_()

    def send(self, x: Tensor, into: Tensor, purpose: str) -> None:
        """Copies from the device to the host. `x` may be let go of at once, but not be written to before `join`."""
        self._ledger.add(HOST, f"{purpose} out", x.numel(), x.element_size())
        with self._stream.aside():
            into.copy_(x, non_blocking=True)
        self._stream.keep(x)

    def bring(self, x: Tensor, into: Tensor, purpose: str) -> None:
        """Copies from the host to the device, behind all that was sent before; the current queue waits for it."""
        self._ledger.add(HOST, f"{purpose} back", x.numel(), x.element_size())
        with self._stream.aside():
            into.copy_(x, non_blocking=True)
        self._stream.join()

    def join(self) -> None:
        """What is queued from here on comes after all that was sent: it may be written to."""
        self._stream.join()

    def settle(self) -> None:
        """Waits until all that was sent is here."""
        self._stream.wait()

    def thread(self) -> Executor:
        """One that computes here, beside the device."""
        return ThreadPoolExecutor(max_workers=1, thread_name_prefix="update")

    def read(self, *scalars: Tensor) -> list[Tensor]:
        """Small tensors of the device, for the host to compute with; waits for them."""
        return [scalar.cpu() for scalar in scalars]
