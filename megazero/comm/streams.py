"""Run communication and copies in parallel with computation on a GPU; on a CPU, do nothing.

A rank sends tensors that it has computed, and computes with tensors that it has received. On a GPU, computation and
communication are streams of work. This module keeps them in order without a wait of the host: work `queued` on the side
stream starts after all work queued before it, and runs in parallel with work queued later, until `join`.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class Streams:
    """The streams of a GPU, for one thread of the host.

    `Stream.wait_stream` would make an event for each wait. A wait refers to the event as it was recorded when the wait
    was queued, so one event can be recorded again for each wait.
    """

    def __init__(self) -> None:
        self._event = torch.cuda.Event()

    def new(self, device: torch.device) -> torch.cuda.Stream:
        """Return a new stream of a device."""
        return torch.cuda.Stream(device)

    def current(self) -> torch.cuda.Stream:
        """Return the stream that operations are queued on now."""
        return torch.cuda.current_stream()

    def use(self, stream: torch.cuda.Stream) -> AbstractContextManager[object]:
        """Return a context in which operations are queued on the stream."""
        return torch.cuda.stream(stream)

    def follow(self, behind: torch.cuda.Stream, ahead: torch.cuda.Stream) -> None:
        """Make `behind` wait for all work that is queued on `ahead` at this point."""
        self._event.record(ahead)
        behind.wait_event(self._event)

    def keep(self, x: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Keep the memory of x until the stream has used it."""
        x.record_stream(stream)


def streams_of(device: torch.device) -> Streams | None:
    """Return the streams of a device; None for a device that does all work at once."""
    return Streams() if device.type == "cuda" else None


class SideStream:
    """A second stream of `device`. No memory is allocated on it: buffers are kept for the run."""

    def __init__(self, device: torch.device):
        self._streams = streams_of(device)
        self._stream: Any = None if self._streams is None else self._streams.new(device)

    def queued(self) -> AbstractContextManager[object]:
        """Queue the operations of the context on the side stream, after those on the current stream so far."""
        if self._streams is None:
            return nullcontext()
        self._streams.follow(self._stream, self._streams.current())
        return self._streams.use(self._stream)

    def keep(self, x: torch.Tensor) -> None:
        """Keep the memory of x from reuse until the work now queued on the side stream is done."""
        if self._streams is not None:
            self._streams.keep(x, self._stream)

    def wait(self) -> None:
        """Block the host until all work on the side stream is done."""
        if self._streams is not None:
            self._stream.synchronize()

    def join(self) -> None:
        """Make the current stream wait for all work on the side stream."""
        if self._streams is not None:
            self._streams.follow(self._streams.current(), self._stream)
