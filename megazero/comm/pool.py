"""Reuse buffers: gathered parameters, gradients before they are reduced, received messages, copies for an update.

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


class Scratch:
    """Memory that each of its users fills and reads before the next one does; all of them share it.

    Args:
        ledger: counts the memory.
    """

    def __init__(self, ledger: Ledger):
        self._ledger = ledger
        self._held: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(self, name: str, category: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the first `numel` elements of a memory, uninitialised; it is allocated again if it is too short."""
        key = name, dtype, device
        if key not in self._held or len(self._held[key]) < numel:
            self._held[key] = torch.empty(numel, dtype=dtype, device=device)
            self._ledger.hold(category, numel * dtype.itemsize)
        return self._held[key][:numel]
