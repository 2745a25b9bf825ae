"""Give the model views of a unit's parameters, and collect its gradients; what rests of it is in `resting.py`.

Values that do not rest whole are whole for a while in a buffer of the pool: gathered parameters (`whole`) between
`install` and `release`, the gradients of one micro-batch (`partial`) from the first delivery until they are reduced.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from megazero.comm.collectives import Pending
from megazero.comm.home import Access, windows
from megazero.comm.pool import Pool, same_place
from megazero.kernels.operations import REFERENCE, Operations
from megazero.zero.gradients import DeliveryCounter, GradientAccumulator
from megazero.zero.layout import Interval, UnitLayout
from megazero.zero.offload import Offload
from megazero.zero.placement import FlatBuffer, Placement, Precision, UnitAxes, redistribute
from megazero.zero.quantized import Quantizers
from megazero.zero.resting import RestingState
from megazero.zero.secondary import second_shard


class Unit:
    """The parameters that are kept, moved and updated together.

    Args:
        layout: the place of each parameter in the flat buffer.
        axes: the ranks that share the unit, and the placements along them.
        precision: dtypes.
        device: the device that computes.
        pools: for whole parameters and whole gradients.
        reduction: for gradients that are summed over ranks in another dtype; None: they are summed as they are.
        quantizers: of what is sent between shard ranks; None: it is sent as it is.
        offload: the values that rest elsewhere than on the device; None: none.
        ops: the kernels to use where gradients are wider than parameters.
        trainable: whether it has gradients and is updated. One that is not rests as the stage says, and no more.

    Attributes:
        numel: elements of the whole flat buffer with its padding, which is zero and stays so.
        shard: the elements that this rank updates.
        parameters, gradients: those that rest here.
        masters: the values that the optimizer updates, flat.
        updated: where an update writes parameters in the precision of forward and backward; `depart` sends them on.
        secondary: a second shard of parameters, from which neighbours gather; None: there is none.
        disks: where those rest that have no data here (`comm/home.py`); None: all are in memory.
        whole: all parameters, while this rank has them; else None.
        partial: this rank's gradients of all parameters, while it has them; else None.
        parameters_rest_whole, gradients_rest_whole: all of them rest on the device.
        on_event: called with "gather", "gathered", "released", "reduce", "reduced" when these happen.
    """

    def __init__(
        self,
        layout: UnitLayout,
        axes: UnitAxes,
        precision: Precision,
        device: torch.device,
        pools: tuple[Pool, Pool],
        offload: Offload | None = None,
        *,
        ops: Operations = REFERENCE,
        reduction: Pool | None = None,
        quantizers: Quantizers | None = None,
        trainable: bool = True,
    ):
        self.on_event: Callable[[str], object] = lambda event: None
        self.layout, self.axes, self.device, self._pools, self.reduction = layout, axes, device, pools, reduction
        self._offload = offload = offload or Offload()
        self.disks, self.trainable = offload.disks, trainable
        self.resting = resting = RestingState(layout, axes, precision, device, offload, trainable=trainable)
        self.numel, self.shard, self.updated = resting.numel, resting.shard, resting.updated
        self.parameters, self.gradients, self.masters = resting.parameters, resting.gradients, resting.masters.values
        given, size = quantizers or Quantizers(), len(self.masters)
        self.quantizers = given.of_unit(size, axes.shard, precision.gradients, device)
        self.offloaded_gradients = resting.offloaded_gradients
        # A stage 3 shard on the host that is the whole, with one shard rank, still has to come.
        self.parameters_rest_whole = len(self.parameters) == self.numel and offload.parameters is None
        coded, whole = self.quantizers.parameters, self.parameters_rest_whole
        self.secondary = None if whole else second_shard(self.numel, axes, precision.parameters, device, coded)
        self.gradients_rest_whole = len(self.gradients) == self.numel
        self._ends_of_sum: tuple[FlatBuffer, FlatBuffer] | None = None  # of the reduction, where both rest here
        self.whole: Tensor | None = self.parameters.values if self.parameters_rest_whole else None
        self.partial: Tensor | None = self.gradients.values if self.gradients_rest_whole else None
        self._share: Tensor | None = None
        self.deliveries = DeliveryCounter(layout.name)
        self.views = {i.name: GradientAccumulator(self, i.name, ops) for i in layout.intervals}
        self._members: list[nn.Parameter] = []  # in buffer order
        self._padding = list(layout.padding(self.numel))
        self._places: dict[int, list[Tensor]] = {}  # of each buffer that a pool has given, by its storage
        self._nothing = torch.empty(0, dtype=precision.parameters, device=device)
        if self.partial is not None:
            self._show_gradients()

    @property
    def name(self) -> str:
        return self.layout.name

    @property
    def version(self) -> int:
        """Return a count of the changes in place of a unit that is whole here, through its values or its parameters."""
        assert self.whole is not None, f"unit {self.name} is not there"
        return self.whole._version + sum(parameter._version for parameter in self._members)

    @property
    def own_gradients(self) -> Tensor:
        """Return the memory on the device that receives the reduced gradients of this rank's shard."""
        if self.resting.own_gradients is not None:
            return self.resting.own_gradients
        share = self._share if self._share is not None else self.partial
        assert share is not None, f"the gradients of unit {self.layout.name} are elsewhere"
        return share

    @property
    def reduced_gradients(self) -> Tensor:
        """Return the reduced gradients that the update reads at the end of a step, wherever they rest."""
        return self.own_gradients if self.offloaded_gradients is None else self.offloaded_gradients.buffer.values

    @contextmanager
    def reduced_gradients_in_memory(self) -> Iterator[Tensor]:
        """Hold the reduced gradients in memory: those that rest on disks are brought to that of the host."""
        away = self.offloaded_gradients
        if away is None or not self.reduced_gradients.is_meta:
            yield self.reduced_gradients
            return
        numel, dtype, here = len(self.masters), self.reduced_gradients.dtype, self.device.type == "cpu"
        found = self._pools[1].take(numel) if here else torch.empty(numel, dtype=dtype)
        try:
            away.bring(found)
            yield found
        finally:
            if here:
                self._pools[1].give(found)

    def make_parameters(self) -> dict[str, nn.Parameter]:
        """Return the model's parameters: views of this unit's memory, which `install` and `release` move."""
        return self.move_parameters([nn.Parameter(self._nothing, requires_grad=self.trainable) for _ in self.views])

    def move_parameters(self, parameters: list[nn.Parameter]) -> dict[str, nn.Parameter]:
        """Let parameters, in buffer order, be views of this unit's memory; return them by name."""
        self._members = parameters
        for parameter, view in zip(parameters, self.views.values(), strict=True):
            parameter.gradient_slot = view  # type: ignore[attr-defined]
        self._show(self._nothing if self.whole is None else _view(self.whole, i) for i in self.layout.intervals)
        return dict(zip(self.views, parameters, strict=True))

    def _show(self, values: Iterable[Tensor]) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # parameters may watch what others do with them
            for parameter, own in zip(self._members, values, strict=True):
                parameter.data = own

    def start_unshard(self) -> tuple[Tensor, Pending]:
        """Start to gather all parameters into a buffer of the pool; `install` it when they have come."""
        self.on_event("gather")
        if self._pools[0] is self._pools[1]:
            self._offload.join()  # gradients may still be read there
        whole = FlatBuffer(self._pools[0].take(self.numel), {})
        if self.secondary is not None:
            return whole.values, self.secondary.start_unshard(self.parameters, whole, "parameters")
        pending = redistribute(self.parameters, whole, "parameters", quantizer=self.quantizers.parameters)
        return whole.values, pending

    def expect(self) -> None:
        """Start to read parameters that rest on disks, because they will be gathered soon."""
        second = self.secondary is not None and self.secondary.fresh
        if self.parameters.values.is_meta and self.disks is not None and not second:
            self.disks.expect(self.parameters.values)

    def install(self, whole: Tensor) -> None:
        """Show the model its parameters in this buffer, of `start_unshard`."""
        assert self.whole is None, f"unit {self.layout.name} is there already"
        self.whole = whole
        self._show(self._views_of(whole))
        self.on_event("gathered")

    def release(self) -> None:
        """Free the gathered parameters; whoever touches one then sees an empty tensor."""
        if self.parameters_rest_whole or self.whole is None:
            return
        self._pools[0].give(self.whole)
        self.whole = None
        self._show([self._nothing] * len(self._members))
        self.on_event("released")

    def discard(self, whole: Tensor) -> None:
        """Free gathered parameters, of `start_unshard`, that were for other ranks alone."""
        self.on_event("gathered")
        self._pools[0].give(whole)
        self.on_event("released")

    @property
    def window(self) -> int:
        """Return the elements of a window of `update_windows`; windows begin at multiples of it."""
        return max(self.numel, 1) if self.disks is None else self.disks.window

    def update_windows(self, state: Mapping[str, Tensor], skip: Tensor) -> Iterator[tuple[slice, list[Tensor]]]:
        """Yield what an update reads and writes of this rank's shard, some elements at a time.

        Args:
            state: what the optimizer keeps of each element.
            skip: 0-dim; 1: nothing will change, so what is on disks is not even read.

        Yields:
            (their place; masters, reduced gradients, each of the state, and `updated`, which may be the masters).
        """
        flats: list[tuple[Tensor, Access]] = [(self.masters, "update"), (self.reduced_gradients, "read")]
        flats.extend((each, "update") for each in state.values())
        apart = not same_place(self.updated.values, self.masters)
        if apart:
            flats.append((self.updated.values, "write"))
        for where, window in windows(self.disks, flats, "optimizer", skip):
            yield where, window if apart else [*window, window[0]]

    def depart(self) -> None:
        """Copy updated parameters to where they rest, if `updated` is other memory."""
        if self.secondary is not None:
            self.secondary.forget()
        redistribute(self.updated, self.resting.own_parameters, "parameters")

    @property
    def publishes(self) -> bool:
        """Return whether this rank updates only a part of parameters that rest whole."""
        return self.parameters_rest_whole and len(self.masters) < self.numel

    def start_publish(self) -> Pending:
        """Start to gather the updated parameters into the memory where all of them rest."""
        return redistribute(self.resting.own_parameters, self.parameters, "parameters")

    def open_gradients(self) -> None:
        """Make sure that there is memory for the gradients of all parameters."""
        if self.partial is not None:
            return
        self.partial = self._pools[1].take(self.numel)
        self._show_gradients()
        self._offload.join()
        if self.offloaded_gradients is not None and self.offloaded_gradients.begun and len(self.masters) == self.numel:
            self.offloaded_gradients.bring(self.partial)  # with one shard rank gradients are accumulated here alone
            for view in self.views.values():
                view.fresh = False

    def start_reduce(self, *, accumulate: bool) -> Pending:
        """Start to reduce the partial gradients over the shard axis, to where the optimizer state is.

        Args:
            accumulate: earlier ones of this step have been reduced; these are added.
        """
        self.on_event("reduce")
        if self.axes.shard.size > 1 and len(self.masters) < self.numel:
            self._open_share(accumulate=accumulate)
        partial, own = self._ends_of_sum or self._reduced_between()
        return redistribute(
            partial,
            own,
            "gradients",
            accumulate=accumulate,
            through=self.reduction,
            quantizer=self.quantizers.gradients,
            hops=(self.axes.near, self.axes.far) if self.axes.far.size > 1 else None,
        )

    def _reduced_between(self) -> tuple[FlatBuffer, FlatBuffer]:
        """Return this rank's gradients, and where their sum goes."""
        assert self.partial is not None, f"unit {self.layout.name} has no gradients"
        shard = self.axes.shard
        partial = FlatBuffer(self.partial, {shard: Placement.PARTIAL})
        ends = partial, FlatBuffer(self.own_gradients, {shard: self.axes.stage.optimizer}, self.shard.start)
        if self.gradients_rest_whole:
            self._ends_of_sum = ends
        return ends

    def _open_share(self, *, accumulate: bool) -> None:
        """Make sure that there is memory for the reduced gradients; fill it with those reduced before if asked for."""
        if self.gradients_rest_whole or len(self.gradients):
            return
        assert self.offloaded_gradients is not None, "reduced gradients rest elsewhere"
        self._share = self._pools[1].take(len(self.masters))
        self._offload.join()
        if accumulate:
            self.offloaded_gradients.bring(self._share)

    def end_reduce(self) -> None:
        """Send the reduced gradients to where the update reads them, if they do not rest on the device."""
        if self.offloaded_gradients is not None:
            self.offloaded_gradients.send(self.own_gradients)
        if self._share is not None:
            self._pools[1].give(self._share)
            self._share = None
        self.on_event("reduced")

    def take_reduced(self, first: int) -> Tensor:
        """Return reduced gradients from element `first` of the shard on; `put_reduced` has to follow."""
        if self.offloaded_gradients is None:
            return self.own_gradients[first:]
        reduced = self._pools[1].take(len(self.masters) - first)
        self.offloaded_gradients.bring(reduced, first)
        return reduced

    def put_reduced(self, first: int, reduced: Tensor) -> None:
        """Write the reduced gradients back and free the buffer."""
        if self.offloaded_gradients is not None:
            self.offloaded_gradients.send(reduced, first)
            self._pools[1].give(reduced)

    def close_gradients(self) -> None:
        """Write zeros to padding, where quantised blocks leave NaN, and for parameters without a delivery."""
        self.open_gradients()
        assert self.partial is not None
        for elements in self._padding:
            self.partial[elements].zero_()
        for view in self.views.values():
            if view.fresh:
                view.close()

    def require_gradients(self) -> None:
        """Raise an error if a parameter has had no gradient in this step: UserError 305."""
        self.deliveries.require(self.views)

    def drop_gradients(self) -> None:
        """Free the memory of the partial gradients, which have been reduced."""
        if self.partial is not None and not self.gradients_rest_whole:
            self._pools[1].give(self.partial)
            self.partial = None
        self.forget_gradients()

    @property
    def visiting_bytes(self) -> int:
        """Return the bytes of whole parameters and gradients that are here for a while, beside those that rest."""
        whole = 0 if self.whole is None or self.parameters_rest_whole else self.whole.nbytes
        return whole + (0 if self.partial is None or self.gradients_rest_whole else self.partial.nbytes)

    def begin_step(self) -> None:
        """Forget the gradients of the step before."""
        self.deliveries.clear()
        self.forget_gradients()
        if self.offloaded_gradients is not None:
            self.offloaded_gradients.begun = False

    def forget_gradients(self) -> None:
        """Let the next delivery to each parameter be the first."""
        for view in self.views.values():
            view.fresh = True

    def parameter(self, name: str) -> Tensor:
        """Return the values of one parameter of a unit that is whole here, as a view."""
        assert self.whole is not None, f"unit {self.layout.name} is not there"
        return _view(self.whole, next(i for i in self.layout.intervals if i.name == name))

    def keep_own_gradients(self) -> None:
        """Let another sum over the ranks count gradients that rest whole and have been reduced once.

        Each keeps what it updates; where all update everything, the first does.
        """
        if not self.gradients_rest_whole:
            return
        keeps = self.shard if len(self.masters) < self.numel or self.axes.shard.rank == 0 else slice(0, 0)
        self.gradients.values[: keeps.start].zero_()
        self.gradients.values[keeps.stop :].zero_()

    def whole_gradients(self) -> Tensor:
        """Return the reduced gradients of the whole unit, in new memory. Every rank calls it."""
        shard = self.axes.shard
        home = None if self.offloaded_gradients is None else self.offloaded_gradients.buffer.home
        own = FlatBuffer(self.reduced_gradients, {shard: self.axes.stage.optimizer}, self.shard.start, home)
        whole = torch.empty(self.numel, dtype=own.values.dtype, device=self.device)
        found = redistribute(own, FlatBuffer(whole, {}), "gradients").wait()
        partial = FlatBuffer(found, {self.axes.replica: Placement.PARTIAL})
        return redistribute(partial, FlatBuffer(found, {}), "gradients").wait()

    def take_whole(self, names: Collection[str]) -> None:
        """Let parameters rest as they are in a unit that is whole here, where somebody has changed them."""
        assert self.whole is not None, f"unit {self.layout.name} is not there"
        for interval in self.layout.intervals:
            if interval.name in names:
                self.resting.write(self.whole[interval.start : interval.stop], interval.start)
        self._offload.join()
        if self.secondary is not None:
            self.secondary.forget()

    def whole_views(self) -> list[Tensor]:
        """Return the values of all parameters of a unit that is whole here, in buffer order, as views."""
        assert self.whole is not None, f"unit {self.layout.name} is not there"
        return self._views_of(self.whole)

    def _show_gradients(self) -> None:
        assert self.partial is not None
        for accumulator, place in zip(self.views.values(), self._views_of(self.partial), strict=True):
            accumulator.view = place

    def _views_of(self, flat: Tensor) -> list[Tensor]:
        """Return each parameter's place in a buffer; made once, because the buffers of a pool come again and again."""
        key = flat.untyped_storage()._cdata
        if key not in self._places:
            self._places[key] = [_view(flat, interval) for interval in self.layout.intervals]
        return self._places[key]


def _view(flat: Tensor, interval: Interval) -> Tensor:
    return flat[interval.start : interval.stop].view(interval.shape)
