"""Partition kept inputs over the tensor axis (Pa, the ZeRO paper's section 6.1), optionally on the host or on disks.

All t ranks of the tensor axis compute the same residual stream, and each would keep it. Instead each keeps one of t
equal parts, and they all-gather an input before its use: n (t - 1) / t elements for an input of n, in addition to the
2 n (t - 1) / t of every sum in the block. If sequence parallelism has split the stream already, there is nothing to
gather, and only the offload to the host or to disks remains.

Inputs are used in the reverse order of keeping, so the restore of one starts to prefetch the one kept before it: its
transfer from the host and its all-gather overlap with the recomputation of the later block. Two whole inputs exist at a
time. A part from a disk must arrive before it can be sent, and only the host knows when it has arrived: so with disks
the all-gather starts when the input is used.
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
        arena: the slots of parts.
        axis: the ranks that share an input; with size 1 the part is the whole input.
        pool: memory for whole inputs.
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
    """The part of one input on this rank; `before` is the input kept before it, to prefetch.

    `before` is an input of the previous block or of an earlier micro-batch. If that micro-batch's backward is done, as
    it is when backwards run in the order of forwards, the prefetch does nothing.
    """

    def __init__(self, store: PartitionedStore, slot: Tensor, shape: torch.Size, before: "_Part | None"):
        self._store, self._shape, self._before = store, shape, before
        self._slot: Tensor | None = slot  # None: given back to the arena
        self._whole: Tensor | None = None  # the whole input, being filled or complete
        self._read: Future[None] | None = None  # of this rank's part, from a disk
        self._gather: Pending | None = None

    def start(self) -> None:
        """Start to fetch and all-gather the input, which is used soon."""
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
        if self._slot is not None:  # give it back only here, so that no new input overwrites it while it is read
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
