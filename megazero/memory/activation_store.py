"""One buffer, allocated before the first step, for all the inputs that a pipeline stage keeps.

Kept inputs and short-lived activations alternate in an allocator, and fragment it: the ZeRO paper saw models run out
with a third of the memory free (section 6.3, memory defragmentation, MD). So what is kept is copied to slots of that
buffer. How many slots are needed is known from the schedule.

On disks (ZeRO-Infinity) a slot is a buffer of its own, so that it is written whole and nothing of it has to be read
before. An input is copied to one buffer of the device, from which the disks take it while the next block computes: so
it may be freed or written to at once, and what is on its way takes the same memory however slow the disks are.

(Disks: Rajbhandari et al. 2021, arXiv 2104.07857, section 5.1.2, of memory of the host; here it passes through that.)
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
        slots: the most inputs that are kept at once.
        numel: elements of each.
        ledger: counts the memory.
        home: where to keep them; None: on the device.
        going: memory of the device for one input on its way to disks, which other arenas of a rank may use too.
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
            ledger.hold("inputs", slots * numel * dtype.itemsize)  # before, so that who finds no memory can tell
            memory = torch.empty(slots, numel, dtype=dtype, device=device)
        self._free = list(memory)[::-1]

    def put(self, flat: Tensor) -> Tensor:
        """Copy an input [numel] to a free slot, or start to; return the slot."""
        assert self._free, "all slots are taken: the schedule keeps more than it said"
        slot = self._free.pop()
        if self._home is None:
            return slot.copy_(flat)
        if self._going is not None:
            self._home.join()  # the input before has left
            flat = self._going.copy_(flat)
        self._home.send(flat, slot, "inputs")
        return slot

    def fetch(self, slot: Tensor, into: Tensor) -> "Future[None] | None":
        """Copy a slot to memory of the device, which the current stream may use afterwards.

        The slot may be freed when what computes the inputs to be kept is queued after the copy.

        Returns: from disks, which are read after all that was put before, the reading to wait for.
        """
        if isinstance(self._home, PagedHome):
            return self._home.start_bring(slot, into, "inputs")
        if self._home is None:
            into.copy_(slot)
        else:
            self._home.bring(slot, into, "inputs")
        return None

    def give(self, slot: Tensor) -> None:
        """Free a slot; it is written to after all that was fetched before."""
        self._free.append(slot)


class KeptInSlot(Kept):
    """An input that is kept whole, in an arena."""

    def __init__(self, arena: Arena, x: Tensor):
        self._arena, self._slot, self._shape = arena, arena.put(x.detach().reshape(-1)), x.shape

    def restore(self) -> Tensor:
        """Return the slot itself; nothing of the recomputation may change it, or use it after `free`."""
        return self._slot.view(self._shape)

    def free(self) -> None:
        """Give the slot back to the arena."""
        self._arena.give(self._slot)
