"""Send the micro-batches of a step to a device: packed into one buffer of pinned memory, by one copy.

The loader's thread packs the next step while the device computes. The copy is queued after the work of the step
before, so the host never waits for it; the micro-batches are views of the memory that receives it. There are two host
buffers, and one is written to again only when the device has read it. On a CPU nothing is packed or copied.
"""

from __future__ import annotations  # of micro-batches only the fields are used

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

_ALIGNED = 16  # bytes: no dtype is wider


@dataclass
class _Buffer:
    """Pinned memory, and where in the device's queue it has been read."""

    memory: Tensor | None = None
    read: Mark | None = None


class Upload:
    """The way of micro-batches to one device.

    Args:
        device: where they are used.

    Attributes:
        allocate: returns that many bytes of host memory from which the device copies by itself.
        marked: marks the end of the device's queue.
    """

    def __init__(self, device: torch.device):
        self._device, self.allocate, self.marked = device, pinned_bytes, mark
        self._buffers = deque([_Buffer(), _Buffer()])
        self._stop = threading.Event()

    def pack(self, batches: Sequence[MicroBatch]) -> Callable[[], list[MicroBatch]]:
        """Copy micro-batches to the host buffer whose turn it is; return what sends it and gives those of the device.

        Both may be called in different threads. The one is called before `pack` is called the next time but one.
        """
        size = sum(_padded(x) for batch in batches for x in _tensors(batch))
        self._buffers.rotate()
        buffer = self._buffers[0]
        # A thread's current device is the first one of the host, unless it is told.
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
        """End a `pack` that waits for the device, in whichever thread, with `StoppedError`; no other is to follow."""
        self._stop.set()


def views(memory: Tensor, like: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Return micro-batches of the same shapes whose tensors are views of `memory` (uint8), one after the other."""
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
