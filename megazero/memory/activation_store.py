"""Keep all inputs of a pipeline stage in one buffer, allocated before the first step.

Kept inputs alternate with short-lived activations in an allocator and fragment it: the ZeRO paper saw models run out of
memory with a third of it free (section 6.3, memory defragmentation, MD). So kept inputs are copied to slots of the
buffer. The schedule determines the number of slots.

On disks (ZeRO-Infinity) each slot is a separate buffer, which is always written whole, so nothing has to be read before
a write. An input is first copied to one staging buffer on the device, which the disks read while the next block
computes: so the input may be freed or overwritten at once, and slow disks do not increase the memory in flight.

(Rajbhandari et al. 2021, arXiv 2104.07857, section 5.1.2, offloads to host memory; here inputs pass through it.)
"""

from concurrent.futures import Future

import torch
from torch import Tensor

from megazero.comm.home import PagedHome
from megazero.comm.host import Host
from megazero.comm.ledger import Ledger
from megazero.memory.recompute import Kept


class Arena:
    """Slots of one size, in the memory of the device or of the host, or on disks.

    Args:
        slots: the largest number of inputs kept at once.
        numel: elements of each slot.
        ledger: counts the memory.
        home: the host or the disks that hold the slots; None: the device holds them.
        going: staging buffer on the device for one input on its way to disks; arenas of a rank may share it.
    """

    def __init__(
        self,
        slots: int,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        ledger: Ledger,
        home: Host | PagedHome | None = None,
        going: Tensor | None = None,
    ):
        self._home, self._going = home, going
        if isinstance(home, PagedHome):
            memory = [home.zeros(numel, dtype, "inputs") for _ in range(slots)]
        elif home is not None:
            memory = home.empty((slots, numel), dtype, "inputs")
        else:
            ledger.hold("inputs", slots * numel * dtype.itemsize)  # first, so that an out-of-memory report includes it
            memory = torch.empty(slots, numel, dtype=dtype, device=device)
        self._free = list(memory)[::-1]

    def put(self, flat: Tensor) -> Tensor:
        """Copy an input [numel] to a free slot, or start the copy; return the slot."""
        assert self._free, "all slots are taken: the schedule keeps more than it said"
        slot = self._free.pop()
        if self._home is None:
            return slot.copy_(flat)
        if self._going is not None:
            self._home.join()  # the previous input has left the staging buffer
            flat = self._going.copy_(flat)
        self._home.send(flat, slot, "inputs")
        return slot

    def fetch(self, slot: Tensor, into: Tensor) -> "Future[None] | None":
        """Copy a slot to `into`, in device memory, in the order of the current stream.

        Do not `give` the slot back before the stream that computes later inputs waits for the copy: `put` reuses slots.

        Returns: for disks, the future of the read, which follows all earlier writes; else None.
        """
        if isinstance(self._home, PagedHome):
            return self._home.start_bring(slot, into, "inputs")
        if self._home is None:
            into.copy_(slot)
        else:
            self._home.bring(slot, into, "inputs")
        return None

    def give(self, slot: Tensor) -> None:
        """Free a slot for a later `put`, see `fetch`."""
        self._free.append(slot)


class KeptInSlot(Kept):
    """An input that is kept whole in an arena."""

    def __init__(self, arena: Arena, x: Tensor):
        self._arena, self._slot, self._shape = arena, arena.put(x.detach().reshape(-1)), x.shape

    def restore(self) -> Tensor:
        """Return a view of the slot; the recomputation must not write to it or use it after `free`."""
        return self._slot.view(self._shape)

    def free(self) -> None:
        """Return the slot to the arena."""
        self._arena.give(self._slot)
