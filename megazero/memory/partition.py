"""Split kept inputs over the tensor axis (Pa, the ZeRO paper's section 6.1), on the host or on disks if asked.

The ranks of the tensor axis compute the same residual stream, and would all keep it. Instead each keeps one of `size`
equal parts, and before an input is needed they gather it: n (t - 1) / t elements for each input of n, in addition
to the 2 n (t - 1) / t of every sum in the block. Where the stream is split already, by sequence parallelism, there is
nothing to gather, and only the move to the host or to disks remains.

Inputs are needed in the reverse order in which they were kept, so when one is asked for, the fetch of the one before it
starts: it comes from the host, and from the other ranks, while the block after it is being computed. Two whole inputs
are there at a time. What comes from a disk has to be there before it can be sent to others, and no rank knows when that
is but the host: so then the gather begins where the input is needed.
"""

from concurrent.futures import Future

import torch
from torch import Tensor

from megazero.comm.collectives import Pending, start_all_gather_in_place
from megazero.comm.grid import Axis
from megazero.comm.pool import Pool
from megazero.comm.streams import SideStream
from megazero.memory.activation_store import Arena
from megazero.memory.recompute import Kept


class PartitionedStore:
    """A store that keeps this rank's part of every input.

    Args:
        arena: of parts.
        axis: whose ranks have the other parts; of size 1 the part is the whole.
        pool: for whole inputs.
    """

    def __init__(self, arena: Arena, axis: Axis, pool: Pool, device: torch.device):
        self.arena, self.axis, self.pool, self.stream = arena, axis, pool, SideStream(device)
        self._last: _Part | None = None

    def __call__(self, x: Tensor) -> "_Part":
        """Keep an input until its backward."""
        part = x.detach().reshape(-1).chunk(self.axis.size)[self.axis.rank]
        self._last = _Part(self, self.arena.put(part), x.shape, self._last)
        return self._last


class _Part(Kept):
    """The part of one input on this rank; `before` is the input that was kept before it.

    That one is of the block before, or of another micro-batch, whose backward is done if micro-batches go through
    backward in their order.
    """

    def __init__(self, store: PartitionedStore, slot: Tensor, shape: torch.Size, before: "_Part | None"):
        self._store, self._shape, self._before = store, shape, before
        self._slot: Tensor | None = slot  # None: nothing is in it that is needed any more
        self._whole: Tensor | None = None  # on its way, or there
        self._read: Future[None] | None = None  # its part, from a disk
        self._gather: Pending | None = None

    def start(self) -> None:
        """Start to fetch and gather the input, which will be needed soon."""
        store = self._store
        if self._slot is None or self._whole is not None:
            return
        self._whole = store.pool.take(self._shape.numel())
        with store.stream.queued():
            self._read = store.arena.fetch(self._slot, self._whole.chunk(store.axis.size)[store.axis.rank])
            if self._read is None:
                self._gather = start_all_gather_in_place(self._whole, store.axis, "inputs")

    def restore(self) -> Tensor:
        self.start()
        store, whole = self._store, self._whole
        assert whole is not None
        if self._read is not None:
            self._read.result()
        with store.stream.queued():
            if self._gather is None:
                self._gather = start_all_gather_in_place(whole, store.axis, "inputs")
            self._gather.wait()
        store.stream.join()
        if self._slot is not None:  # not given back before: an input would be written over one that is still read
            store.arena.give(self._slot)
            self._slot = None
        if self._before is not None:
            self._before.start()
            self._before = None
        return whole.view(self._shape)

    def free(self) -> None:
        assert self._whole is not None
        self._store.pool.give(self._whole)
        self._whole = None
