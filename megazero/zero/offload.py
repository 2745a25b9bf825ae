"""Keep masters, moments, gradients or parameter shards of a unit in another home: the host's memory, or a paged one.

    zero.offload.optimizer     masters and moments, updated by the host; and, where they rest sharded, gradients
    zero.offload.parameters    the shards of stage 3

(Ren et al. 2021, ZeRO-Offload, arXiv 2101.06840; disks, and stage 3 parameters: Rajbhandari et al. 2021, ZeRO-Infinity,
arXiv 2104.07857.)

The reduced gradients of a unit are sent away while backward computes those of the unit before. With several
micro-batches the accumulated sum comes back, and the next micro-batch's is added on the device, so sums are taken in
the same place and order as without offload. After the update each unit's parameters are sent to the device while the
host updates the next unit. From a paged home an update reads masters, moments and gradients window by window, and
writes them back after it (`comm/home.py`). Results are the same bit for bit.
"""

from dataclasses import dataclass

from megazero.comm.home import Home, PagedHome
from megazero.comm.host import Host
from megazero.plan.placements import Placement


@dataclass(frozen=True, eq=False)
class Offload:
    """The choice of a unit's values that rest elsewhere than on the device.

    Attributes:
        host: the host, if its memory is not the device's: values from a paged home to the device stop there.
        optimizer, parameters: the home of these; None: the device.
        delayed: updates run in parallel with the next step (`optim/delayed.py`).
    """

    host: Host | None = None
    optimizer: Home | None = None
    parameters: Home | None = None
    delayed: bool = False

    @property
    def paged(self) -> PagedHome | None:
        """Return the one of the two homes that is paged, if any."""
        return next((home for home in (self.optimizer, self.parameters) if isinstance(home, PagedHome)), None)

    def gradients(self, placement: Placement) -> Home | None:
        """Return the home of reduced gradients between their reduction and the update, of a placement in the table.

        The host updates what is in a paged home, and takes gradients that rest whole on the device from there.
        """
        if not isinstance(self.optimizer, PagedHome) or placement is Placement.SHARD:
            return self.optimizer
        return self.host

    def join(self) -> None:
        """Queue later work after all that was sent, whose memory may still be read."""
        for home in self._homes():
            home.join()

    def settle(self) -> None:
        """Wait until what an update reads has arrived, and what it writes is not on its way any more."""
        for home in self._homes():
            if home is not self.parameters or home is self.optimizer or isinstance(home, PagedHome):
                home.settle()

    def _homes(self) -> list[Home]:
        """Return the distinct places that something is sent to."""
        through = self.host if isinstance(self.optimizer, PagedHome) else None
        return [home for home in dict.fromkeys((self.optimizer, self.parameters, through)) if home is not None]
