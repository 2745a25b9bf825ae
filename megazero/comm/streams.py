"""Run communication and copies beside computation on a GPU; on a CPU, do nothing.

The tensors that a rank sends depend on those it has computed, and the next ones on those received. On a GPU both are
streams of work, and this keeps them in order without the host ever waiting: work `queued` on the side stream starts
after all that was queued before it, and runs beside what is queued later, until `join`.
"""

from contextlib import AbstractContextManager, nullcontext

import torch


class SideStream:
    """A stream beside the current one of `device`. No memory is allocated in it: buffers are kept for the run."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def queued(self) -> AbstractContextManager[object]:
        """Queue what is called inside on the side stream, behind all that is queued on the current one so far."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def keep(self, x: torch.Tensor) -> None:
        """Keep the memory of x from reuse until the work now queued on the side stream is done."""
        if self._stream is not None:
            x.record_stream(self._stream)

    def wait(self) -> None:
        """Block the host until all work on the side stream is done."""
        if self._stream is not None:
            self._stream.synchronize()

    def join(self) -> None:
        """Make the current stream wait for all work on the side stream."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
