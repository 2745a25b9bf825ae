"""Stage device tensors through host memory, for a backend that sends from there only.

Ranks that share a GPU cannot use NCCL, which refuses two ranks on one device; gloo takes tensors on the host. So an
operation copies its input from the device into pinned memory and runs there exactly as between CPUs, with results equal
to the last bit; its wait copies the result to the device.

Both copies are queued on the current stream, after the work that computes the tensor and before the work that reads it.
The host waits for each copy, because it sends the values. So no copy is under way when a call returns, and neither a
buffer nor a tensor can be reused too early, whatever stream the next call is made on.
"""

import mmap

import torch
from torch import Tensor

from megazero.comm.ledger import Ledger
from megazero.comm.pool import Pool

_ALL, NOTHING = slice(None), slice(0)


def staging_pool(device: torch.device, ledger: Ledger) -> Pool:
    """Return a pool of host memory for tensors of `device`, pinned if that is a GPU.

    On a CPU it counts as separate from the device's memory: every copy is made.
    """
    return Pool(torch.uint8, torch.device("cpu"), ledger, "host_bounce", pinned=device.type == "cuda")


class HostStaging:
    """The host's copy of a device tensor in one operation. It holds no reference to that tensor.

    Args:
        x: a contiguous tensor on the device.
        pool: a pool of bytes.
        fetched: the elements of x that are copied to the host now; the others are uninitialised there.

    Attributes:
        host: flat memory of the tensor's dtype and size on the host.
    """

    def __init__(self, x: Tensor, pool: Pool, fetched: slice = _ALL):
        self._pool = pool
        # Whole pages, so that payloads of many lengths (`gather_bytes`) share a few sizes, and no size is 0.
        self._buffer = pool.take((x.nbytes // mmap.PAGESIZE + 1) * mmap.PAGESIZE)
        self.host = self._buffer[: x.nbytes].view(x.dtype)
        self.host[fetched].copy_(x.detach().view(-1)[fetched])

    def end(self, into: Tensor | None = None, first: int = 0) -> None:
        """Copy the elements from `first` on to the device tensor `into`, if any; then return the memory to the pool."""
        if into is not None:
            into.view(-1).copy_(self.host[first : first + into.numel()])
        self._pool.give(self._buffer)
