"""Stage device tensors through host memory, for a backend that sends from there only.

Ranks that share a GPU cannot use NCCL, which refuses two ranks on one device; gloo takes tensors of the host. So an
operation copies what it sends from the device into pinned memory, runs there exactly as it does between CPUs, to the
same bits, and the wait for it copies what has come to the device.

Both copies are queued on the current stream, after what computes the tensor and before what reads it, and the host
waits for each: messages are sent by the host, and need the numbers. So no copy is under way when a call returns, and
neither a buffer nor a tensor can be used again too early, whatever stream the next call is made on.
"""

import mmap

import torch
from torch import Tensor

from megazero.comm.ledger import Ledger
from megazero.comm.pool import Pool

_ALL, NOTHING = slice(None), slice(0)


def staging_pool(device: torch.device, ledger: Ledger) -> Pool:
    """Return a pool of host memory for tensors of `device`, pinned where that is a GPU.

    On a CPU it counts as separate from the device's memory: every copy is made.
    """
    return Pool(torch.uint8, torch.device("cpu"), ledger, "host_bounce", pinned=device.type == "cuda")


class HostStaging:
    """Host memory that stands for a tensor of the device in one operation. It holds no reference to that tensor.

    Args:
        x: a contiguous tensor of the device.
        pool: of bytes.
        fetched: the elements of x that are copied to the host now; the others are uninitialised there.

    Attributes:
        host: flat memory of the tensor's dtype and size on the host.
    """

    def __init__(self, x: Tensor, pool: Pool, fetched: slice = _ALL):
        self._pool = pool
        # Whole pages: texts of many lengths (`gather_bytes`) share a few sizes, and nothing is of size 0.
        self._buffer = pool.take((x.nbytes // mmap.PAGESIZE + 1) * mmap.PAGESIZE)
        self.host = self._buffer[: x.nbytes].view(x.dtype)
        self.host[fetched].copy_(x.detach().view(-1)[fetched])

    def end(self, into: Tensor | None = None, first: int = 0) -> None:
        """Return the memory to the pool, after a copy to a tensor of the device of its elements, from `first` on."""
        if into is not None:
            into.view(-1).copy_(self.host[first : first + into.numel()])
        self._pool.give(self._buffer)
