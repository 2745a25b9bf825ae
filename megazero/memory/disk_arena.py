"""Keep the inputs of a pipeline stage on disks, in slots that are written behind its forward (ZeRO-Infinity).

A slot is a buffer of its own, so that it is written whole and nothing of it has to be read before. An input is copied
to one buffer of the device, from which the disks take it while the next block computes: so it may be freed or written
to at once, and what is on its way takes the same memory however slow the disks are.

(Rajbhandari et al. 2021, arXiv 2104.07857, section 5.1.2, of memory of the host; here it passes through that.)
"""

from concurrent.futures import Future

from torch import Tensor

from megazero.comm.home import PagedHome


class DiskArena:
    """Slots of one size on disks.

    Args:
        slots: the most inputs that are kept at once.
        going: memory of the device for one input on its way, which other arenas of a rank may use too.
        disks: count what they hold and move.
    """

    def __init__(self, slots: int, going: Tensor, disks: PagedHome):
        self._going, self._disks = going, disks
        self._free = [disks.zeros(len(going), going.dtype, "inputs") for _ in range(slots)][::-1]

    def put(self, flat: Tensor) -> Tensor:
        """Start to write an input [numel] to a free slot, and return the slot."""
        assert self._free, "all slots are taken: the schedule keeps more than it said"
        slot = self._free.pop()
        self._disks.join()  # the input before has left
        self._going.copy_(flat)
        self._disks.send(self._going, slot, "inputs")
        return slot

    def fetch(self, slot: Tensor, into: Tensor) -> "Future[None]":
        """Start to read a slot into memory of the device, behind all that was put before."""
        return self._disks.start_bring(slot, into, "inputs")

    def give(self, slot: Tensor) -> None:
        """Free a slot: what is put there is written behind all that was fetched before."""
        self._free.append(slot)
