"""One buffer, allocated before the first step, for all the inputs that a pipeline stage keeps.

Kept inputs and short-lived activations alternate in an allocator, and fragment it: the ZeRO paper saw models run out
with a third of the memory free (section 6.3, memory defragmentation, MD). So what is kept is copied to slots of that
buffer. How many slots are needed is known from the schedule.
"""

import torch
from torch import Tensor

from megazero.comm.host import Host
from megazero.comm.ledger import Ledger


class Arena:
    """Slots of one size, in the memory of the device or of the host.

    Args:
        slots: the most inputs that are kept at once.
        numel: elements of each.
        ledger: counts the memory.
        host: where to keep them; None: on the device.
    """

    def __init__(
        self,
        slots: int,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        ledger: Ledger,
        host: Host | None = None,
    ):
        self._host = host
        if host is None:
            ledger.hold("inputs", slots * numel * dtype.itemsize)  # before, so that who finds no memory can tell
            self.memory = torch.empty(slots, numel, dtype=dtype, device=device)
        else:
            self.memory = host.empty((slots, numel), dtype, "inputs")
        self._free = list(self.memory)[::-1]

    def put(self, flat: Tensor) -> Tensor:
        """Copy an input [numel] to a free slot, and return the slot."""
        assert self._free, f"{len(self.memory)} slots are taken: the schedule keeps more than it said"
        slot = self._free.pop()
        if self._host is None:
            slot.copy_(flat)
        else:
            self._host.send(flat, slot, "inputs")
        return slot

    def fetch(self, slot: Tensor, into: Tensor) -> None:
        """Copy a slot to memory of the device, which the current stream may use afterwards.

        The slot may be freed when what computes the inputs to be kept is behind the copy.
        """
        if self._host is None:
            into.copy_(slot)
        else:
            self._host.bring(slot, into, "inputs")

    def give(self, slot: Tensor) -> None:
        """Free a slot."""
        self._free.append(slot)


class ArenaStore:
    """A store that keeps inputs whole, in an arena."""

    def __init__(self, arena: Arena):
        self._arena = arena

    def keep(self, x: Tensor) -> "_Slot":
        return _Slot(self._arena, self._arena.put(x.detach().reshape(-1)), x.shape)


class _Slot:
    def __init__(self, arena: Arena, slot: Tensor, shape: torch.Size):
        self._arena, self._slot, self._shape = arena, slot, shape

    def restore(self) -> Tensor:
        """Return the slot itself; nothing of the recomputation may change it, or use it after `free`."""
        return self._slot.view(self._shape)

    def free(self) -> None:
        self._arena.give(self._slot)
