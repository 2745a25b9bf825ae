"""Collect the gradients of a unit, and reduce them to where its optimizer state is.

If gradients do not rest whole, a buffer of the pool holds the whole gradients of one micro-batch, from the first
delivery until they are reduced.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megazero.comm.collectives import Pending
from megazero.zero.extension import Summing
from megazero.zero.gradients import DeliveryCounter, GradientAccumulator
from megazero.zero.layout import UnitLayout
from megazero.zero.placement import FlatBuffer, Placement, UnitAxes, redistribute
from megazero.zero.resting import Resources, RestingState
from megazero.zero.unit_parameters import views_of


class UnitGradients:
    """The gradients of one unit, from their delivery to their reduction.

    Attributes:
        rest_whole: all of them rest on the device.
        partial: this rank's gradients of all parameters, flat, while it has them; else None.
        deliveries: counts the deliveries of gradients.
        views: the accumulator of each parameter, in buffer order.
        summing: how they are summed over the shard axis.
        reduction: buffers of another dtype in which they are summed over other axes; None: in their own dtype.
        wait: waits until no update under way reads offloaded gradients.
        on_event: called with "reduce" and "reduced" when these happen.
    """

    def __init__(self, layout: UnitLayout, axes: UnitAxes, resting: RestingState, resources: Resources):
        self._layout, self._axes, self._resting = layout, axes, resting
        self._pool, self._offload, self.reduction = resources.partials, resources.offload, resources.reduction
        self._device = resources.device
        self.on_event: Callable[[str], object] = lambda event: None
        self.rest_whole = len(resting.gradients) == resting.numel
        self.partial: Tensor | None = resting.gradients.values if self.rest_whole else None
        self.summing = Summing(resources.reduction)
        for extension in resources.extensions:
            self.summing = extension.summing(self.summing, resting.shard, axes)
        self._away, self._shares = resting.offloaded_gradients, len(resting.masters) < resting.numel
        self._share: Tensor | None = None
        self._begun = False  # there are offloaded gradients of this step
        self.wait: Callable[[], object] = lambda: None
        self._ends_of_sum: tuple[FlatBuffer, FlatBuffer] | None = None  # of the reduction, if both rest here
        self._padding = list(layout.padding(resting.numel))
        self._places: dict[int, list[Tensor]] = {}  # views in each buffer of the pool, by its storage
        self.deliveries = DeliveryCounter(layout.name)
        names, ops = [interval.name for interval in layout.intervals], resources.ops
        self.views = {name: GradientAccumulator(self.deliveries, name, ops, self.open) for name in names}
        if self.partial is not None:
            self._show(self.partial)

    def _show(self, partial: Tensor) -> None:
        for accumulator, place in zip(self.views.values(), views_of(partial, self._layout, self._places), strict=True):
            accumulator.view = place

    @property
    def own(self) -> Tensor:
        """Return the memory on the device that receives the reduced gradients of this rank's shard."""
        if self._resting.own_gradients is not None:
            return self._resting.own_gradients
        share = self._share if self._share is not None else self.partial
        assert share is not None, f"the gradients of unit {self._layout.name} are elsewhere"
        return share

    @property
    def reduced(self) -> Tensor:
        """Return this rank's reduced gradients, which the update reads, on the device or the host.

        On disks: a tensor without data, see `reduced_in_memory`.
        """
        return self.own if self._away is None else self._away.values

    @contextmanager
    def reduced_in_memory(self) -> Iterator[Tensor]:
        """Lend the reduced gradients within the context; if they rest on disks, a copy in host memory."""
        if self._away is None or not self.reduced.is_meta:
            yield self.reduced
            return
        numel, pooled = len(self._resting.masters), self._device.type == "cpu"
        found = self._pool.take(numel) if pooled else torch.empty(numel, dtype=self.reduced.dtype)
        self._bring(found)
        yield found
        if pooled:
            self._pool.give(found)

    def send(self, reduced: Tensor, at: int = 0) -> None:
        """Copy reduced gradients from the device to elements [at, ...) of the offloaded gradients."""
        assert self._away is not None, f"the gradients of unit {self._layout.name} are on the device"
        self.wait()
        redistribute(FlatBuffer(reduced, {}, at), self._away, "gradients")
        self._begun = True

    def _bring(self, into: Tensor, at: int = 0) -> None:
        """Copy elements [at, ...) of the offloaded gradients to the device."""
        assert self._away is not None, f"the gradients of unit {self._layout.name} are on the device"
        redistribute(self._away.part(slice(at, at + len(into))), FlatBuffer(into, {}, at), "gradients").wait()

    def begin_step(self) -> None:
        """Forget the gradients of the step before."""
        self.deliveries.clear()
        self.forget()
        self._begun = False

    def open(self) -> None:
        """Make sure that there is memory for the gradients of all parameters."""
        if self.partial is not None:
            return
        self.partial = self._pool.take(self._resting.numel)
        self._show(self.partial)
        self._offload.join()
        if self._begun and not self._shares:
            self._bring(self.partial)  # without shards, gradients are accumulated in this buffer
            for view in self.views.values():
                view.fresh = False

    def close(self) -> None:
        """Complete the gradients before they are reduced: write zeros for parameters without a delivery.

        Also to the padding, where quantised blocks may have left NaN. Takes a buffer if there is none.
        """
        self.open()
        assert self.partial is not None
        for elements in self._padding:
            self.partial[elements].zero_()
        for view in self.views.values():
            if view.fresh:
                view.close()

    def start_reduce(self, *, accumulate: bool) -> Pending:
        """Start to reduce the partial gradients over the shard axis, each element to the rank that updates it.

        Call `end_reduce` when it is complete.

        Args:
            accumulate: add to the gradients of this step that have been reduced before.
        """
        self.on_event("reduce")
        resting = self._resting
        if self._axes.shard.size > 1 and self._shares and not self.rest_whole and not len(resting.gradients):
            assert self._away is not None, "reduced gradients rest elsewhere"
            self._share = self._pool.take(len(resting.masters))
            self._offload.join()
            if accumulate:
                self._bring(self._share)
        if (ends := self._ends_of_sum) is None:
            assert self.partial is not None, f"unit {self._layout.name} has no gradients"
            shard, stage = self._axes.shard, self._axes.stage
            partial = FlatBuffer(self.partial, {shard: Placement.PARTIAL})
            ends = partial, FlatBuffer(self.own, {shard: stage.optimizer}, resting.shard.start)
            self._ends_of_sum = ends if self.rest_whole else None
        return self.summing.start(*ends, accumulate=accumulate)

    def end_reduce(self) -> None:
        """Send the reduced gradients to where the update reads them, if they do not rest on the device."""
        if self._away is not None:
            self.send(self.own)
        if self._share is not None:
            self._pool.give(self._share)
            self._share = None
        self.on_event("reduced")

    def take_reduced(self, first: int) -> Tensor:
        """Return reduced gradients from element `first` of the shard on; call `put_reduced` afterwards."""
        if self._away is None:
            return self.own[first:]
        reduced = self._pool.take(len(self._resting.masters) - first)
        self._bring(reduced, first)
        return reduced

    def put_reduced(self, first: int, reduced: Tensor) -> None:
        """Send what `take_reduced(first)` returned back to where gradients rest, if elsewhere, and free its buffer."""
        if self._away is not None:
            self.send(reduced, first)
            self._pool.give(reduced)

    def drop(self) -> None:
        """Free the memory of the partial gradients, which have been reduced."""
        if self.partial is not None and not self.rest_whole:
            self._pool.give(self.partial)
            self.partial = None
        self.forget()

    def forget(self) -> None:
        """Make the next delivery to each parameter the first, which overwrites."""
        for view in self.views.values():
            view.fresh = True

    def keep_own(self) -> None:
        """Zero copies of reduced gradients, so that in another sum over the ranks each element counts once.

        Only for gradients that rest whole. Each rank keeps the elements that it updates; if all update everything, the
        first keeps all.
        """
        if not self.rest_whole:
            return
        keeps = self._resting.shard if self._shares or self._axes.shard.rank == 0 else slice(0, 0)
        self._resting.gradients.values[: keeps.start].zero_()
        self._resting.gradients.values[keeps.stop :].zero_()

    def whole(self) -> Tensor:
        """Return the reduced gradients of the whole unit, in new memory. Every rank calls it."""
        axes, home = self._axes, None if self._away is None else self._away.home
        own = FlatBuffer(self.reduced, {axes.shard: axes.stage.optimizer}, self._resting.shard.start, home)
        whole = torch.empty(self._resting.numel, dtype=own.values.dtype, device=self._device)
        found = redistribute(own, FlatBuffer(whole, {}), "gradients").wait()
        partial = FlatBuffer(found, {axes.replica: Placement.PARTIAL})
        return redistribute(partial, FlatBuffer(found, {}), "gradients").wait()
