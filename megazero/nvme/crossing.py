"""Copy between a device's memory and memory from which disks are written, by the thread that waits for disks.

On a CPU both are one memory. On a GPU the thread has a stream of its own, and waits for it: the thread that trains does
not. What it copies was computed, or its target was last used, before the thread that trains asked for the copy: a mark
stands for that moment. Not run on a GPU yet.
"""

from typing import Any

import torch
from torch import Tensor

from megazero.comm.pinned import pinned_bytes
from megazero.nvme.disk_queue import aligned

Mark = Any  # an event of the device; None: there is nothing to wait for


class Crossing:
    """Copies between a device and the host."""

    def __init__(self, device: torch.device):
        self._device = device  # a thread's current one is the first, unless it is told
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def mark(self) -> Mark:
        """Return a mark for all that is queued on the device so far."""
        return None if self._stream is None else torch.cuda.current_stream(self._device).record_event()

    def copy(self, into: Tensor, source: Tensor, mark: Mark) -> None:
        """Copy what was there at a mark, and wait until it is done."""
        if self._stream is None or not (into.is_cuda or source.is_cuda):
            into.copy_(source)
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            into.copy_(source, non_blocking=True)
        self._stream.synchronize()

    def memory(self, nbytes: int) -> Tensor:
        """Return host memory for the copies that disks are written from and read to, aligned as these need it."""
        if self._stream is None:
            return aligned(nbytes)
        with torch.cuda.device(self._device):
            return pinned_bytes(nbytes)
