"""Reduce gradients over ranks with different samples, and over ranks with different uses of a parameter.

A unit's reduction starts when its last gradient has arrived, and ends when the next one starts; it runs in parallel
with the backward of the next unit. Reductions start in the reverse order of the forward, whatever the order in which
units become complete. A unit that backward never reached is reduced as zeros at the end, because the other ranks wait
for it.

    along           sums over                                    when
    shard           samples, to where the optimizer state is     stages 0, 1: once a step; 2, 3: each micro-batch
    replica         the samples of all shard groups, for each    once a step, `sum_replicas`
                    rank's shard only
    copies          the uses of a tied weight                    once a step, `sum_copies`
    tensor          tokens (sequence parallelism) or heads, for  once a step, `sum_tails`
                    parameters that are whole on every rank

The first three may be taken in another dtype (`zero.reduce_dtype`); the last, of few elements, uses the gradients'.
"""

from collections import deque
from collections.abc import Callable, Iterable

import torch

from megazero.comm.collectives import Pending, done
from megazero.comm.grid import Axis
from megazero.comm.pool import Pool
from megazero.comm.streams import SideStream
from megazero.zero.placement import FlatBuffer, Placement, redistribute
from megazero.zero.unit import Unit

_UNDER_WAY = 1  # reductions that may be started and not finished


class Reduction:
    """The reduction of the gradients of one stage's units, through the micro-batches of a step.

    Args:
        units: in forward order.
    """

    def __init__(self, units: list[Unit], device: torch.device):
        self._units = units
        self._last = False
        self._stream = SideStream(device)
        self._ready = [False] * len(units)
        self._next = -1  # the unit whose reduction starts next; -1: none in this backward
        self._under_way: deque[tuple[Unit, Pending]] = deque()
        self._reduced: set[Unit] = set()  # in this step
        # Called with each unit whose own gradients are complete; they are then dropped instead of reduced.
        self.inspect: Callable[[Unit], object] | None = None
        self.follows: Reduction | None = None  # the reduction of this backward that starts its units first
        for index, unit in enumerate(units):
            unit.gradients.deliveries.on_complete = lambda index=index: self._complete(index)

    def clear(self) -> None:
        """Forget the gradients of the step before."""
        self._reduced.clear()
        self._next = -1

    def begin_backward(self, *, reduce: bool, last: bool) -> None:
        """Prepare for the gradients of a micro-batch.

        Args:
            reduce: reduce each unit's gradients, with those accumulated before, when they are complete.
            last: it is the last micro-batch of the step.
        """
        self._last = last
        self._next = len(self._units) - 1 if reduce else -1
        self._ready = [False] * len(self._units)

    def end_backward(self) -> None:
        """Reduce the units that backward never reached; forget the micro-batch."""
        self._ready = [True] * len(self._units)
        self._begin_ready()
        for unit in self._units:
            unit.gradients.deliveries.end()

    def finish(self) -> None:
        """Wait for the reductions under way; after the last micro-batch, sum over the replicas."""
        self._finish(0)
        if self._last and self.inspect is None:
            sum_replicas(self._units)

    def _complete(self, index: int) -> None:
        self._ready[index] = True
        self._begin_ready()

    def _begin_ready(self) -> None:
        while self._next >= 0 and self._ready[self._next] and not (self.follows and self.follows._next >= 0):
            unit = self._units[self._next]
            self._next -= 1
            with unit.axes.shard.comm.ledger.time(unit.layout.name, "reduce"):
                unit.gradients.close()
                with self._stream.queued():
                    self._under_way.append((unit, self._start(unit)))
            self._finish(_UNDER_WAY)

    def _finish(self, leave: int) -> None:
        while len(self._under_way) > leave:
            unit, pending = self._under_way.popleft()
            with unit.axes.shard.comm.ledger.time(unit.layout.name, "reduce"):
                with self._stream.queued():
                    pending.wait()
                self._stream.join()
            if self.inspect is None:
                unit.gradients.end_reduce()
            if not unit.gradients.rest_whole:
                unit.gradients.drop()

    def _start(self, unit: Unit) -> Pending:
        if self.inspect is not None:
            self.inspect(unit)
            return done(torch.empty(0))
        accumulate = unit in self._reduced
        self._reduced.add(unit)
        if self._last:
            unit.gradients.deliveries.require(unit.gradients.views)
        return unit.gradients.start_reduce(accumulate=accumulate)


def sum_replicas(units: Iterable[Unit]) -> None:
    """Sum the reduced gradients of each rank's shards over the shard groups, once a step.

    The sums run one after the other, while no other operation is open: if ranks use shared memory in a shard group and
    sockets between groups, a rank that waits for a socket could block one that waits for a free slot in shared memory.
    """
    for unit in units:
        if unit.axes.replica.size > 1:
            _sum(unit, unit.axes.replica, 0, "gradients", unit.gradients.reduction)()


def sum_copies(units: Iterable[Unit]) -> None:
    """Sum the reduced gradients of units that the first and the last pipeline stage share, once a step."""
    for unit in units:
        if unit.axes.copies.size > 1:
            _sum(unit, unit.axes.copies, 0, "tied", unit.gradients.reduction)()


def sum_tails(units: Iterable[Unit]) -> None:
    """Sum the reduced gradients of parameters that tensor ranks hold whole, each with those of its tokens or heads."""
    under_way = []
    for unit in units:
        tail = unit.layout.tp_replicated if unit.axes.sequence else unit.layout.tp_partial
        if tail is not None and (first := max(0, tail - unit.shard.start)) < len(unit.masters):
            under_way.append(_sum(unit, unit.axes.tensor, first, "tail"))
    for finish in under_way:
        finish()


def _sum(unit: Unit, axis: Axis, first: int, purpose: str, through: Pool | None = None) -> Callable[[], None]:
    """Start to sum a shard's reduced gradients from element `first` on over an axis; return a function that ends it.

    Args:
        through: see `redistribute`.
    """
    reduced = unit.gradients.take_reduced(first)
    buffer = FlatBuffer(reduced, {axis: Placement.PARTIAL})
    pending = redistribute(buffer, FlatBuffer(reduced, {}), purpose, through=through)
    return lambda: unit.gradients.put_reduced(first, pending.wait())
