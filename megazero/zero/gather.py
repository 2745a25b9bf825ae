"""Parameters are there when they are needed, and were asked for before.

Where they rest sharded (stage 3), a part of the model asks for its units before it runs, and for those of its
neighbour, whose gathering then goes on beside the computation; afterwards they are released. Where only the optimizer
state is sharded (stages 1 and 2), the gathering of each unit's updated parameters begins right after its update, and
the next forward waits for a unit when it gets there.
"""

import torch

from megazero.comm.collectives import MOST_UNREAD, Pending, start_all_gather_in_place
from megazero.comm.grid import Axis
from megazero.comm.streams import SideStream
from megazero.zero.unit import Unit


class Gather:
    """Which units have their parameters, or will have them soon.

    Args:
        data: the axis over which they are gathered.
    """

    def __init__(self, data: Axis, device: torch.device):
        self._data, self._stream = data, SideStream(device)
        self._coming: dict[Unit, tuple[torch.Tensor, Pending]] = {}

    def prefetch(self, units: list[Unit]) -> None:
        """They will be needed soon."""
        for unit in units:
            if unit.whole is None and unit not in self._coming:
                with self._time(unit), self._stream.aside():
                    whole = unit.allocate_unsharded()
                    self._coming[unit] = whole, start_all_gather_in_place(whole, self._data, "parameters")

    def unshard(self, units: list[Unit]) -> None:
        """They are needed now."""
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
        """The unit has been updated: everybody gets its parameters, where they rest whole."""
        if unit in self._coming:
            self.unshard([unit])  # of the update before, if nothing has needed it since
        unit.depart()
        if unit.parameters_rest_whole and len(unit.masters) < unit.numel:
            with self._time(unit), self._stream.aside():
                pending = start_all_gather_in_place(unit.parameters, self._data, "parameters")
            self._coming[unit] = unit.parameters, pending
            # What is left lying for the next forward must not hold up whatever comes before it.
            while sum(pending.unread for _, pending in self._coming.values()) > MOST_UNREAD // 2:
                self.unshard([next(iter(self._coming))])

    def reshard(self, units: list[Unit]) -> None:
        """They are not needed for now."""
        for unit in units:
            unit.release()

    def reshard_all(self, units: list[Unit]) -> None:
        """No unit is needed for now, nor will what is on its way to one be right after an update."""
        self.unshard([unit for unit in self._coming if not unit.parameters_rest_whole])
        self.reshard(units)

    def _time(self, unit: Unit):
        return self._data.comm.ledger.time(unit.layout.name, "gather")
