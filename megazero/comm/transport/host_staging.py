"""Tensors of a device on a backend that sends from the host's memory only: they go through a *bounce* buffer there.

Ranks that share a GPU cannot use NCCL, which refuses two ranks on one device; gloo takes tensors of the host. So an
operation copies what it sends from the device into pinned memory, runs there exactly as it does between CPUs, to the
same bits, and the wait for it copies what has come to the device.

Both copies are queued on the current stream, behind what computes the tensor and before what reads it, and the host
waits for each: messages are sent by the host, and need the numbers. So no copy is under way when a call returns, and
neither a buffer nor a tensor can be used again too early, whatever stream the next call is made on.
"""

import mmap

import torch
from torch import Tensor

from megazero.comm.ledger import Ledger
from megazero.comm.pool import Pool

_ALL = slice(None)


def staging_pool(device: torch.device, ledger: Ledger) -> Pool:
    """The host's memory for tensors of `device`, pinned where that is a GPU. On a CPU it is declared apart: every copy
    is made.
    """
    return Pool(torch.uint8, torch.device("cpu"), ledger, "host_bounce", pinned=device.type == "cuda")


class HostStaging:
    """Memory of the host that stands for a tensor of the device in one operation. It keeps no hold of that tensor.

    Args:
        like: a contiguous tensor of the device.
        pool: of bytes.

    Attributes:
        host: the tensor's place on the host, flat, of its dtype; holds anything at first.
    """

    def __init__(self, like: Tensor, pool: Pool):
        self._pool = pool
        # Whole pages: texts of many lengths (`gather_bytes`) share a few sizes, and nothing is of size 0.
        self._buffer = pool.take((like.nbytes // mmap.PAGESIZE + 1) * mmap.PAGESIZE)
        self.host = self._buffer[: like.nbytes].view(like.dtype)

    def fetch(self, x: Tensor, place: slice = _ALL) -> None:
        """x comes from the device to a place of as many elements on the host."""
        self.host[place].copy_(x.detach().view(-1))

    def land(self, into: Tensor, place: slice = _ALL) -> None:
        """What is at a place on the host goes into a tensor of the device of as many elements."""
        into.view(-1).copy_(self.host[place])

    def release(self) -> None:
        """Another operation may have the memory."""
        self._pool.give(self._buffer)
