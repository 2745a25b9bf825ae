"""Copy the state to be saved to memory of the host, in parallel with the passes of the next step.

What is on a GPU is copied on a stream of its own, which the update waits for and the host does not; what is on the host
is copied by the saver's thread. The memory of the copies is allocated once.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megazero.comm.pinned import pinned_bytes
from megazero.comm.streams import SideStream


def on_device(x: Tensor) -> bool:
    """Return whether a tensor is in the memory of a GPU."""
    return x.is_cuda


class Snapshot:
    """Copies of some tensors, with the values that these had at `begin`.

    Args:
        sources: the tensors.

    Attributes:
        copies: of the sources, in their order; all there once `arrive` has returned.
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
        """Start to copy from the GPU what has been computed so far."""
        if self._stream is not None:
            with self._stream.queued():
                copy_all(self._far)
            self._begun = True

    def copy_near(self) -> None:
        """Copy what is on the host. The background thread calls it."""
        if self._near:
            copy_all(self._near)

    def join(self) -> None:
        """Let what is computed from now on wait until all has been read on the GPU."""
        if self._stream is not None and self._begun:
            self._stream.join()
            self._begun = False

    def arrive(self) -> None:
        """Wait until all copies are there. The background thread calls it."""
        if self._stream is not None:
            self._stream.wait()


def copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the first of each pair to the second."""
    for source, copy in pairs:
        copy.copy_(source, non_blocking=True)
