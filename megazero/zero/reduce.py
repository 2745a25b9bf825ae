"""Gradients go to where the optimizer state is, as soon as a unit has all of them.

A unit's reduction begins when its last gradient has arrived, and is finished when the next unit's begins: what is
received is added up while the backward of another unit has computed something to send. Reductions begin in one fixed
order, the reverse of the forward's, whatever the order in which units become complete; a unit that backward never
reached takes its turn with zeros at the end, because the other ranks wait for it.
"""

from collections import deque
from collections.abc import Callable

import torch

from megazero.comm.collectives import Pending, done, start_all_reduce, start_reduce_scatter
from megazero.comm.streams import SideStream
from megazero.zero.placement import ParallelAxes, Placement
from megazero.zero.unit import Unit

_UNDER_WAY = 1  # reductions that may be begun and not finished


class Reduction:
    """The gradients of one stage's units, through the micro-batches of a step.

    Args:
        units: in forward order.
    """

    def __init__(self, units: list[Unit], axes: ParallelAxes, device: torch.device):
        self._units, self._spread = units, axes
        self._stream = SideStream(device)
        self._ready = [False] * len(units)
        self._next = -1  # the unit whose reduction begins next; -1: none in this backward
        self._under_way: deque[tuple[Unit, Pending]] = deque()
        self._reduced: set[Unit] = set()  # in this step
        # Called with each unit that has all its own gradients, which are then not reduced but dropped.
        self.inspect: Callable[[Unit], object] | None = None
        for index, unit in enumerate(units):
            unit.deliveries.on_complete = lambda index=index: self._complete(index)

    def clear(self) -> None:
        """What was gathered before is past."""
        self._reduced.clear()
        self._next = -1

    def begin_backward(self, *, reduce: bool) -> None:
        """The gradients of a micro-batch come now.

        Args:
            reduce: they, and those that have gathered before, are reduced as units become complete.
        """
        self._next = len(self._units) - 1 if reduce else -1
        self._ready = [False] * len(self._units)

    def end_backward(self) -> None:
        """Closes what backward never reached."""
        self._ready = [True] * len(self._units)
        self._begin_ready()
        for unit in self._units:
            unit.deliveries.end()

    def finish(self) -> None:
        """Waits for what is under way."""
        self._finish(0)

    def _complete(self, index: int) -> None:
        self._ready[index] = True
        self._begin_ready()

    def _begin_ready(self) -> None:
        while self._next >= 0 and self._ready[self._next]:
            unit = self._units[self._next]
            self._next -= 1
            with self._spread.data.comm.ledger.time(unit.layout.name, "reduce"):
                unit.close_gradients()
                with self._stream.aside():
                    self._under_way.append((unit, self._start(unit)))
            self._finish(_UNDER_WAY)

    def _finish(self, leave: int) -> None:
        while len(self._under_way) > leave:
            unit, pending = self._under_way.popleft()
            with self._spread.data.comm.ledger.time(unit.layout.name, "reduce"):
                with self._stream.aside():
                    pending.wait()
                self._stream.join()
            if self.inspect is None:
                unit.park()
            if not unit.gradients_rest_whole:
                unit.drop_gradients()

    def _start(self, unit: Unit) -> Pending:
        data = self._spread.data
        partial = unit.partial
        assert partial is not None
        if self.inspect is not None:
            self.inspect(unit)
            return done(partial)
        accumulate = unit in self._reduced
        self._reduced.add(unit)
        if data.size == 1:
            return done(partial)
        if self._spread.stage.optimizer is Placement.REPLICATE:
            return start_all_reduce(partial, data, "gradients")
        unit.open_share(accumulate=accumulate)
        return start_reduce_scatter(partial, data, "gradients", out=unit.own_gradients, accumulate=accumulate)
