"""Read small results from the device once they are computed, without waiting for work queued after them."""

import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

Mark = torch.Event  # a place in a device's queue
_LOOK = 50e-6  # seconds between queries: signals are handled and other threads run in between


def mark(device: torch.device) -> Mark | None:
    """Mark the present end of the device's current stream; return None for a CPU, which queues nothing."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


class StoppedError(RuntimeError):
    """The error of a thread that was told to end while it waited for the device."""


def passed(place: Mark | None, stop: threading.Event | None = None) -> None:
    """Wait until the device has passed a mark, and for nothing else.

    Args:
        stop: ends the wait when set. A thread needs it, because a hung device passes no mark, and a process cannot end
            before its threads. The main thread needs none: signals end it.

    Raises:
        StoppedError: `stop` was set.
    """
    while place is not None and not place.query():
        if stop is None:
            time.sleep(_LOOK)
        elif stop.wait(_LOOK):
            raise StoppedError


class Readback:
    """Tensors on their way to pinned memory of the host, by copies queued after the work that computes them.

    Args:
        marked: marks the end of a device's queue.
    """

    def __init__(self, *tensors: Tensor, marked: Callable[[torch.device], Mark | None] = mark):
        self._copies = [x.to("cpu", non_blocking=True) for x in tensors]  # torch allocates pinned memory for this
        self._mark = marked(tensors[0].device)

    def wait(self) -> list[Tensor]:
        """Wait until the copies are done, and return them."""
        passed(self._mark)
        return self._copies

    def numbers(self) -> list[float]:
        """Wait until the copies are done, and return the elements of the first tensor."""
        return self.wait()[0].tolist()
