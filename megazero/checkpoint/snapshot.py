"""Copy the state to be saved to host memory, in parallel with the passes of the next step.

State on a GPU is copied on a side stream; the next update waits for it, the host does not. State on the host is copied
by the saver's thread. The memory for the copies is allocated once.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megazero.comm.pinned import pinned_bytes
from megazero.comm.streams import SideStream


def on_device(x: Tensor) -> bool:
    """Return True if a tensor is in GPU memory."""
    return x.is_cuda


class Snapshot:
    """Copies of tensors, with their values at `begin`.

    Args:
        sources: the tensors.

    Attributes:
        copies: one for each source, in order; complete after `copy_near` and `arrive`.
    """

    def __init__(self, sources: Sequence[Tensor]):
        self.copies = [
            pinned_bytes(x.nbytes).view(x.dtype).view(x.shape) if on_device(x) else torch.empty_like(x) for x in sources
        ]
        pairs = list(zip(sources, self.copies, strict=True))
        self._far, self._near = ([pair for pair in pairs if on_device(pair[0]) == there] for there in (True, False))
        self._stream = SideStream(self._far[0][0].device) if self._far else None
        self._begun = False

    def begin(self) -> None:
        """Start to copy the tensors on the GPU, after the work queued so far."""
        if self._stream is not None:
            with self._stream.queued():
                copy_all(self._far)
            self._begun = True

    def copy_near(self) -> None:
        """Copy the tensors on the host. The background thread calls it."""
        if self._near:
            copy_all(self._near)

    def join(self) -> None:
        """Make later work on the current stream wait until the GPU has read all sources."""
        if self._stream is not None and self._begun:
            self._stream.join()
            self._begun = False

    def arrive(self) -> None:
        """Block until the copies from the GPU are complete. The background thread calls it."""
        if self._stream is not None:
            self._stream.wait()


def copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the first of each pair to the second."""
    for source, copy in pairs:
        copy.copy_(source, non_blocking=True)
