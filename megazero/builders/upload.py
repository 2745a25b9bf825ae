"""Send the micro-batches of a step to a device in one copy from one pinned staging buffer.

The loader's thread packs the next step while the device computes. The copy is queued after the previous step's work,
so the host never waits for it; the micro-batches are views of the memory that receives it. There are two staging
buffers; a buffer is reused only after the device has read it. On a CPU nothing is packed or copied.
"""

from __future__ import annotations  # no import of the data package: its types are only named here

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megazero.comm.pinned import pinned_bytes
from megazero.comm.readback import Mark, mark, passed

if TYPE_CHECKING:
    from megazero.data.batch import MicroBatch

_ALIGNED = 16  # bytes; no dtype is wider


@dataclass
class _Buffer:
    """A staging buffer, and the mark in the device's queue after which its content has been read."""

    memory: Tensor | None = None
    read: Mark | None = None


class Upload:
    """Copies micro-batches to one device.

    Args:
        device: the target.

    Attributes:
        allocate: function that returns n bytes of pinned host memory.
        marked: function that marks the end of the device's queue.
    """

    def __init__(self, device: torch.device):
        self._device, self.allocate, self.marked = device, pinned_bytes, mark
        self._buffers = deque([_Buffer(), _Buffer()])
        self._stop = threading.Event()

    def pack(self, batches: Sequence[MicroBatch]) -> Callable[[], list[MicroBatch]]:
        """Copy micro-batches to the next staging buffer; return a function that sends it and returns device views.

        `pack` and that function may run in different threads. Call the function before the second next `pack`, which
        reuses the buffer.
        """
        size = sum(_padded(x) for batch in batches for x in _tensors(batch))
        self._buffers.rotate()
        buffer = self._buffers[0]
        # A new thread's current device is GPU 0 until it is set.
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            passed(buffer.read, self._stop)
            if buffer.memory is None or len(buffer.memory) < size:
                buffer.memory = self.allocate(size)
        host = buffer.memory[:size]
        for batch, view in zip(batches, views(host, batches), strict=True):
            for source, target in zip(_tensors(batch), _tensors(view), strict=True):
                target.copy_(source)

        def send() -> list[MicroBatch]:
            there = torch.empty(size, dtype=torch.uint8, device=self._device)
            there.copy_(host, non_blocking=True)
            buffer.read = self.marked(self._device)
            return views(there, batches)

        return send

    def stop(self) -> None:
        """Make a `pack` that waits for the device, in any thread, raise `StoppedError`; call no `pack` after this."""
        self._stop.set()


def views(memory: Tensor, like: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Return micro-batches with the shapes of `like`, whose tensors are consecutive views of `memory` (uint8)."""
    found, at = [], 0
    for batch in like:
        tensors = {}
        for name, x in vars(batch).items():
            if isinstance(x, Tensor):
                tensors[name] = memory[at : at + x.nbytes].view(x.dtype).view(x.shape)
                at += _padded(x)
        found.append(replace(batch, **tensors))
    return found


def _tensors(batch: MicroBatch) -> Iterator[Tensor]:
    return (x for x in vars(batch).values() if isinstance(x, Tensor))


def _padded(x: Tensor) -> int:
    return -(-x.nbytes // _ALIGNED) * _ALIGNED
