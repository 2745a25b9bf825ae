"""Parameters are there when they are needed, and were asked for before.

Where they rest sharded (stage 3), a part of the model asks for its units before it runs, and for those of its
neighbour, whose gathering then goes on beside the computation; afterwards they are released. Where only the optimizer
state is sharded (stages 1 and 2), the gathering of each unit's updated parameters begins right after its update, and
the next forward waits for a unit when it gets there.
"""

import torch

from megazero.comm.collectives import MOST_UNREAD, Pending
from megazero.comm.streams import SideStream
from megazero.zero.unit import Unit


class Gather:
    """Gathers parameters along the axes of their units, and knows which are on their way."""

    def __init__(self, device: torch.device):
        self._stream = SideStream(device)
        self._coming: dict[Unit, tuple[torch.Tensor, Pending]] = {}

    def prefetch(self, units: list[Unit]) -> None:
        """Start to gather units that will be needed soon."""
        for unit in units:
            if unit.whole is None and unit not in self._coming:
                with self._time(unit), self._stream.aside():
                    self._coming[unit] = unit.start_unshard()

    def unshard(self, units: list[Unit]) -> None:
        """Wait for units that are needed now."""
        self.prefetch(units)
        for unit in units:
            if unit not in self._coming:
                continue
            whole, pending = self._coming.pop(unit)
            with self._time(unit):
                with self._stream.aside():
                    pending.wait()
                self._stream.join()
            if unit.whole is None:
                unit.install(whole)

    def publish(self, unit: Unit) -> None:
        """Start to send a unit's updated parameters to where they rest."""
        if unit in self._coming:
            self.unshard([unit])  # of the update before, if nothing has needed it since
        unit.depart()
        if unit.publishes:
            with self._time(unit), self._stream.aside():
                self._coming[unit] = unit.parameters.values, unit.start_publish()
            # What is left lying for the next forward must not hold up whatever comes before it.
            while sum(pending.unread for _, pending in self._coming.values()) > MOST_UNREAD // 2:
                self.unshard([next(iter(self._coming))])

    def reshard(self, units: list[Unit]) -> None:
        """Free the gathered parameters of units that are not needed for now."""
        for unit in units:
            unit.release()

    def reshard_all(self, units: list[Unit]) -> None:
        """Free all units; what is on its way to one would not be that of the update to come."""
        self.unshard([unit for unit in self._coming if not unit.parameters_rest_whole])
        self.reshard(units)

    def _time(self, unit: Unit):
        return unit.axes.shard.comm.ledger.time(unit.layout.name, "gather")
