"""Reuse buffers: gathered parameters, gradients before they are reduced, received messages.

A buffer is allocated if no buffer of its size is free, and is never freed: units of equal size rotate through the same
few buffers. After the first step nothing is allocated (memory defragmentation, MD, in the ZeRO paper's section 6.3),
and a gather never writes to a fresh page, which the system would have to clear first.
"""

import torch
from torch import Tensor

from megazero.comm.ledger import Ledger
from megazero.comm.pinned import pinned_bytes


def same_place(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one dtype begin at the same element of the same memory.

    No address is read, so that tensors without data have an answer too.
    """
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata and a.storage_offset() == b.storage_offset()


class Pool:
    """Flat buffers of one dtype.

    Args:
        ledger, category: the ledger that counts allocations, and their category there.
        pinned: use page-locked host memory, which a GPU reads and writes directly.
    """

    def __init__(
        self, dtype: torch.dtype, device: torch.device, ledger: Ledger, category: str, *, pinned: bool = False
    ):
        self._dtype, self._device, self._ledger, self._category = dtype, device, ledger, category
        self._pinned = pinned
        self._free: dict[int, list[Tensor]] = {}

    def take(self, numel: int) -> Tensor:
        """Return a buffer of exactly `numel` elements, uninitialised."""
        if free := self._free.get(numel):
            return free.pop()
        self._ledger.hold(self._category, numel * self._dtype.itemsize)
        if self._pinned:
            return pinned_bytes(numel * self._dtype.itemsize).view(self._dtype)
        with torch.inference_mode(False):  # an inference tensor could not be written to in later training
            return torch.empty(numel, dtype=self._dtype, device=self._device)

    def give(self, buffer: Tensor) -> None:
        """Return a buffer to the pool."""
        self._free.setdefault(len(buffer), []).append(buffer)
