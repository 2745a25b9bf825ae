"""Gather parameters before they are needed, in parallel with the computation, and free them afterwards.

If parameters rest sharded (stage 3), a layer waits for its units before it runs, prefetches the units of the next layer
in parallel with its own computation, and then releases its own units. At the end of a backward the next layer is the
first one, if a forward follows. If parameters rest whole but the optimizer state is sharded (stages 1 and 2), the
gather of each unit's updated parameters starts right after its update, and the next forward waits for each unit when it
needs it.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from megazero.comm.collectives import MOST_UNREAD, Pending
from megazero.comm.streams import SideStream
from megazero.zero.unit import Unit


class Gather:
    """Gather the parameters of units along their axes; keep track of the gathers under way.

    Attributes:
        following: the units of the first layer, during a backward that a forward follows; empty if another backward or
            the update comes next.
    """

    def __init__(self, device: torch.device):
        self._stream = SideStream(device)
        self.following: list[Unit] = []
        self._coming: dict[Unit, tuple[torch.Tensor, Pending]] = {}

    def prefetch(self, units: list[Unit]) -> None:
        """Start to gather units that will be needed soon."""
        for unit in units:
            if unit.parameters.whole is None and unit not in self._coming:
                with self._time(unit), self._stream.queued():
                    self._coming[unit] = unit.parameters.start_gather()

    def expect(self, units: list[Unit]) -> None:
        """Start to read from paged homes the parameters that will be prefetched next."""
        for unit in units:
            if unit.parameters.whole is None and unit not in self._coming:
                unit.parameters.expect()

    def unshard(self, units: list[Unit]) -> None:
        """Gather units that are needed now, and wait for them."""
        self.prefetch(units)
        for unit in units:
            if unit not in self._coming:
                continue
            whole, pending = self._coming.pop(unit)
            with self._time(unit):
                with self._stream.queued():
                    pending.wait()
                self._stream.join()
            if unit.parameters.whole is None:
                unit.parameters.install(whole)

    def finish(self) -> None:
        """Wait for the gathers under way. They must not be dropped: after a dropped receive gloo delivers nothing."""
        self.unshard([*self._coming])

    def publish(self, unit: Unit) -> None:
        """Start to send a unit's updated parameters to where they rest."""
        if unit in self._coming:
            self.unshard([unit])  # an earlier update's gather that nothing has waited for
        unit.parameters.send_updated()
        if unit.parameters.publishes:
            with self._time(unit), self._stream.queued():
                self._coming[unit] = unit.parameters.start_publish()
            # Messages that stay unread until the next forward must not take the room of operations before it.
            while sum(pending.unread for _, pending in self._coming.values()) > MOST_UNREAD // 2:
                self.unshard([next(iter(self._coming))])

    def reshard(self, units: list[Unit], needed: Sequence[Unit] = ()) -> None:
        """Free the gathered parameters of units that are not among those needed next."""
        for unit in units:
            if unit not in needed:
                unit.parameters.release()

    def reshard_all(self, units: list[Unit]) -> None:
        """Free all units, also those still being gathered, except `following`: the next update makes values stale."""
        self.unshard([u for u in self._coming if not u.parameters.rest_whole and u not in self.following])
        self.reshard(units)

    def _time(self, unit: Unit) -> AbstractContextManager[None]:
        return unit.axes.shard.comm.ledger.time(unit.layout.name, "gather")
