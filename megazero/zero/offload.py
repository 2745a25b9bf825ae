"""Keep masters, moments, gradients or parameter shards of a unit in another home: the host's memory, or a paged home.

    zero.offload.optimizer     masters and moments, updated by the host; and gradients, if they rest sharded
    zero.offload.parameters    the shards of stage 3

(Ren et al. 2021, ZeRO-Offload, arXiv 2101.06840; disks, and stage 3 parameters: Rajbhandari et al. 2021, ZeRO-Infinity,
arXiv 2104.07857.)

The reduced gradients of a unit are sent to their home while backward computes those of the unit before. With several
micro-batches the accumulated sum is brought back and the next micro-batch's is added on the device, so sums are taken
in the same place and order as without offload. After the update each unit's parameters are sent to the device while the
host updates the next unit. An update reads masters, moments and gradients from a paged home window by window, and
writes each window back (`comm/home.py`). Results are equal to those without offload, bit for bit.
"""

from dataclasses import dataclass

from megazero.comm.home import Home, PagedHome
from megazero.comm.host import Host
from megazero.plan.placements import Placement


@dataclass(frozen=True, eq=False)
class Offload:
    """The homes of a unit's values that do not rest on the device.

    Attributes:
        host: the host, if its memory is not the device's; stages values between a paged home and the device.
        optimizer, parameters: the homes of optimizer state and of parameters; None: the device.
        delayed: updates run in parallel with the next step (`optim/delayed.py`).
    """

    host: Host | None = None
    optimizer: Home | None = None
    parameters: Home | None = None
    delayed: bool = False

    @property
    def paged(self) -> PagedHome | None:
        """Return the paged home among the two, if any."""
        return next((home for home in (self.optimizer, self.parameters) if isinstance(home, PagedHome)), None)

    def gradients(self, placement: Placement) -> Home | None:
        """Return where reduced gradients that rest as `placement` are kept until the update; None: on the device.

        The host updates values in a paged home; gradients that rest whole on the device go to host memory for this.
        """
        if not isinstance(self.optimizer, PagedHome) or placement is Placement.SHARD:
            return self.optimizer
        return self.host

    def join(self) -> None:
        """Make later work wait for all sends, which may still read the tensors that they send."""
        for home in self._homes():
            home.join()

    def settle(self) -> None:
        """Wait until the values that an update reads have arrived, and no send still reads the memory it writes."""
        for home in self._homes():
            if home is not self.parameters or home is self.optimizer or isinstance(home, PagedHome):
                home.settle()

    def _homes(self) -> list[Home]:
        """Return the distinct homes that values are sent to."""
        through = self.host if isinstance(self.optimizer, PagedHome) else None
        return [home for home in dict.fromkeys((self.optimizer, self.parameters, through)) if home is not None]
