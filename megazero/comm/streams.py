"""Communication and copies beside computation on a GPU; on a CPU, nothing.

What a rank sends depends on what has been computed, and what it computes next on what it has received. On a GPU both
are queues of work, and this keeps them in order without the host ever waiting: work queued `aside` begins after all
that was queued before it, and runs beside what is queued later, until `join`.
"""

from contextlib import AbstractContextManager, nullcontext

import torch


class SideStream:
    """One queue beside the current stream of `device`. No memory is allocated in it: buffers are kept for the run."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def aside(self) -> AbstractContextManager[object]:
        """What is queued inside needs nothing that is queued later outside."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def keep(self, x: torch.Tensor) -> None:
        """The memory of x is not used for anything else before what is queued aside now has been done."""
        if self._stream is not None:
            x.record_stream(self._stream)

    def wait(self) -> None:
        """The host waits until everything queued aside has been done."""
        if self._stream is not None:
            self._stream.synchronize()

    def join(self) -> None:
        """What is queued from here on comes after everything queued aside."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
