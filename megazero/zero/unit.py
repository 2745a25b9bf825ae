"""Hold the part of a unit's parameters and gradients that rests on this rank; the model sees views of it.

Whatever rests is allocated once and kept for the whole run, each kind in one flat buffer, on the device or on the host
(`offload.py`):

    parameters   all, or this rank's shard, in the precision that forward and backward compute with
    gradients    all, or this rank's shard
    masters      the elements that this rank updates, in the optimizer's precision: the same memory as `parameters`
                 where that is the same

Values that do not rest whole are whole for a while in a buffer of the pool: gathered parameters (`whole`) between
`install` and `release`, the gradients of one micro-batch (`partial`) from the first delivery until they are reduced.
"""

from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor, nn

from megazero.comm.collectives import Pending
from megazero.comm.host import Host
from megazero.comm.pool import Pool, same_place
from megazero.kernels.operations import REFERENCE, Operations
from megazero.zero.gradients import DeliveryCounter, GradientAccumulator
from megazero.zero.layout import Interval, UnitLayout
from megazero.zero.offload import HostGradients, Offload
from megazero.zero.placement import FlatBuffer, Placement, Precision, UnitAxes, redistribute, shard_slice

_INITIAL_PIECE = 1 << 20  # elements of initial values that are made at once: some 10 MB in fp64


class Unit:
    """The parameters that are kept, moved and updated together.

    Args:
        layout: the place of each parameter in the flat buffer.
        axes: the ranks that share the unit, and the placements along them.
        precision: dtypes.
        device: the device that computes.
        pools: for whole parameters and whole gradients.
        reduction: for gradients that are summed over ranks in another dtype; None: they are summed as they are.
        offload: the values that rest on the host; None: none.
        ops: the kernels to use where gradients are wider than parameters.
        trainable: whether it has gradients and is updated. One that is not rests as the stage says, and no more.

    Attributes:
        numel: elements of the whole flat buffer with its padding, which is zero and stays so.
        shard: the elements that this rank updates.
        parameters, gradients: those that rest here.
        masters: the values that the optimizer updates, flat.
        updated: where an update writes parameters in the precision of forward and backward; `depart` sends them on.
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
        trainable: bool = True,
    ):
        self.trainable = trainable
        self.on_event: Callable[[str], object] = lambda event: None
        self.layout, self.axes, self.device, self._pools, self.reduction = layout, axes, device, pools, reduction
        self._offload = offload = offload or Offload(None)
        stage, updater = axes.stage, offload.updater
        self.numel = layout.padded(axes.shard.size)
        self.shard = shard_slice(self.numel, stage.optimizer, axes.shard)
        resting = shard_slice(self.numel, stage.parameters, axes.shard)
        self.parameters = self._rest(resting, precision.parameters, "parameters", offload.parameters_home)
        # A delayed update may not touch what the step beside it sees.
        apart = trainable and (updater is not offload.parameters_home or offload.delayed)
        masters = self.own_parameters
        if apart or (trainable and precision.masters != precision.parameters):
            masters = self._rest(self.shard, precision.masters, "optimizer", updater)
        self.masters = masters.values
        self.host_gradients: HostGradients | None = None
        if updater is not None and trainable:
            self.host_gradients = HostGradients(updater, self.shard, precision.gradients)
        elsewhere = not trainable or (updater is not None and stage.gradients is Placement.SHARD)
        elements = slice(0, 0) if elsewhere else shard_slice(self.numel, stage.gradients, axes.shard)
        self.gradients = self._rest(elements, precision.gradients, "gradients", None)
        self.updated = masters if apart else self.own_parameters
        if updater is not None and apart and precision.masters != precision.parameters:
            self.updated = self._rest(self.shard, precision.parameters, "parameters", updater)
        # A stage 3 shard on the host that is the whole, with one shard rank, still has to come.
        self.parameters_rest_whole = len(self.parameters) == self.numel and offload.parameters_home is None
        self.gradients_rest_whole = len(self.gradients) == self.numel
        self.whole: Tensor | None = self.parameters.values if self.parameters_rest_whole else None
        self.partial: Tensor | None = self.gradients.values if self.gradients_rest_whole else None
        self._share: Tensor | None = None
        self.deliveries = DeliveryCounter(layout.name)
        self.views = {i.name: GradientAccumulator(self, i.name, ops) for i in layout.intervals}
        self._members: list[nn.Parameter] = []  # in buffer order
        self._padding = list(_gaps(layout, self.numel))
        self._places: dict[int, list[Tensor]] = {}  # of each buffer that a pool has given, by its storage
        self._nothing = torch.empty(0, dtype=precision.parameters, device=device)
        if self.partial is not None:
            self._show_gradients()

    def _rest(self, elements: slice, dtype: torch.dtype, category: str, host: Host | None) -> FlatBuffer:
        """Return zeros for elements that rest here: in the memory of `host`, or, if that is None, on the device."""
        numel = elements.stop - elements.start
        placement = Placement.SHARD if numel < self.numel else Placement.REPLICATE
        if host is not None:
            values = host.zeros(numel, dtype, category)
        else:
            self.axes.shard.comm.ledger.hold(category, numel * dtype.itemsize)
            values = torch.zeros(numel, dtype=dtype, device=self.device)
        return FlatBuffer(values, {self.axes.shard: placement}, elements.start, host)

    @property
    def name(self) -> str:
        return self.layout.name

    @property
    def version(self) -> int:
        """Return a count of the changes in place of a unit that is whole here, through its values or its parameters."""
        assert self.whole is not None, f"unit {self.name} is not there"
        return self.whole._version + sum(parameter._version for parameter in self._members)

    @property
    def own_parameters(self) -> FlatBuffer:
        """Return the parameters that this rank updates, in the precision of forward and backward."""
        return self.parameters.part(self.shard, {self.axes.shard: self.axes.stage.optimizer})

    @property
    def own_gradients(self) -> Tensor:
        """Return the memory on the device that receives the reduced gradients of this rank's shard."""
        if self.gradients_rest_whole:
            return self.gradients.values[self.shard]
        if len(self.gradients):
            return self.gradients.values
        share = self._share if self._share is not None else self.partial
        assert share is not None, f"the gradients of unit {self.layout.name} are on the host"
        return share

    @property
    def reduced_gradients(self) -> Tensor:
        """Return the reduced gradients that the update reads at the end of a step: on the device or on the host."""
        return self.own_gradients if self.host_gradients is None else self.host_gradients.buffer.values

    def fill(self, initial: Callable[[str, int, int], Tensor]) -> None:
        """Write the initial values that rest here; `initial(name, start, stop)` gives an interval of one parameter."""
        first = min(self.parameters.first, self.shard.start)
        last = max(self.parameters.elements.stop, self.shard.stop)
        own = self.own_parameters.values
        for interval in self.layout.intervals:
            end = min(interval.stop, last)
            for start in range(max(interval.start, first), end, _INITIAL_PIECE):
                stop = min(start + _INITIAL_PIECE, end)
                values = initial(interval.name, start - interval.start, stop - interval.start)
                values = values.to(self.masters.dtype)  # rounded as an update rounds: a skipped one changes nothing
                _write(values, start, self.parameters.values, self.parameters.first)
                if not same_place(self.masters, own):
                    _write(values, start, self.masters, self.shard.start)
        self.round_masters()  # a skipped update leaves `updated` as it is

    def make_parameters(self) -> dict[str, nn.Parameter]:
        """Return the model's parameters: views of this unit's memory, which `install` and `release` move."""
        for interval in self.layout.intervals:
            values = self._nothing if self.whole is None else _view(self.whole, interval)
            parameter = nn.Parameter(values, requires_grad=self.trainable)
            parameter.gradient_slot = self.views[interval.name]  # type: ignore[attr-defined]
            self._members.append(parameter)
        names = (interval.name for interval in self.layout.intervals)
        return dict(zip(names, self._members, strict=True))

    def start_unshard(self) -> tuple[Tensor, Pending]:
        """Start to gather all parameters into a buffer of the pool; `install` it when they have come."""
        self.on_event("gather")
        if self._pools[0] is self._pools[1]:
            self._join_host()  # which may still read gradients there
        whole = FlatBuffer(self._pools[0].take(self.numel), {})
        return whole.values, redistribute(self.parameters, whole, "parameters")

    def install(self, whole: Tensor) -> None:
        """Show the model its parameters in this buffer, of `start_unshard`."""
        assert self.whole is None, f"unit {self.layout.name} is there already"
        self.whole = whole
        for parameter, values in zip(self._members, self._views_of(whole), strict=True):
            parameter.data = values
        self.on_event("gathered")

    def release(self) -> None:
        """Free the gathered parameters; whoever touches one then sees an empty tensor."""
        if self.parameters_rest_whole or self.whole is None:
            return
        self._pools[0].give(self.whole)
        self.whole = None
        for parameter in self._members:
            parameter.data = self._nothing
        self.on_event("released")

    def round_masters(self) -> None:
        """Write the masters to `updated`, rounded to the precision of forward and backward."""
        if not same_place(self.updated.values, self.masters):
            self.updated.values.copy_(self.masters)

    def depart(self) -> None:
        """Copy updated parameters to where they rest, if `updated` is other memory."""
        redistribute(self.updated, self.own_parameters, "parameters")

    @property
    def publishes(self) -> bool:
        """Return whether this rank updates only a part of parameters that rest whole."""
        return self.parameters_rest_whole and len(self.masters) < self.numel

    def start_publish(self) -> Pending:
        """Start to gather the updated parameters into the memory where all of them rest."""
        return redistribute(self.own_parameters, self.parameters, "parameters")

    def open_gradients(self) -> None:
        """Make sure that there is memory for the gradients of all parameters."""
        if self.partial is not None:
            return
        self.partial = self._pools[1].take(self.numel)
        self._show_gradients()
        self._join_host()
        if self.host_gradients is not None and self.host_gradients.begun and len(self.masters) == self.numel:
            self.host_gradients.bring(self.partial)  # with one shard rank gradients are accumulated here alone
            for view in self.views.values():
                view.fresh = False
        else:
            for elements in self._padding:
                self.partial[elements].zero_()

    def start_reduce(self, *, accumulate: bool) -> Pending:
        """Start to reduce the partial gradients over the shard axis, to where the optimizer state is.

        Args:
            accumulate: earlier ones of this step have been reduced; these are added.
        """
        assert self.partial is not None, f"unit {self.layout.name} has no gradients"
        self.on_event("reduce")
        shard = self.axes.shard
        if shard.size > 1 and len(self.masters) < self.numel:
            self._open_share(accumulate=accumulate)
        return redistribute(
            FlatBuffer(self.partial, {shard: Placement.PARTIAL}),
            FlatBuffer(self.own_gradients, {shard: self.axes.stage.optimizer}, self.shard.start),
            "gradients",
            accumulate=accumulate,
            through=self.reduction,
        )

    def _open_share(self, *, accumulate: bool) -> None:
        """Make sure that there is memory for the reduced gradients; fill it with those reduced before if asked for."""
        if self.gradients_rest_whole or len(self.gradients):
            return
        assert self.host_gradients is not None, "reduced gradients rest on the host"
        self._share = self._pools[1].take(len(self.masters))
        self._join_host()
        if accumulate:
            self.host_gradients.bring(self._share)

    def end_reduce(self) -> None:
        """Send the reduced gradients to the host, if the update is there."""
        if self.host_gradients is not None:
            self.host_gradients.send(self.own_gradients)
        if self._share is not None:
            self._pools[1].give(self._share)
            self._share = None
        self.on_event("reduced")

    def take_reduced(self, first: int) -> Tensor:
        """Return reduced gradients from element `first` of the shard on; `put_reduced` has to follow."""
        if self.host_gradients is None:
            return self.own_gradients[first:]
        reduced = self._pools[1].take(len(self.masters) - first)
        self.host_gradients.bring(reduced, first)
        return reduced

    def put_reduced(self, first: int, reduced: Tensor) -> None:
        """Write the reduced gradients back and free the buffer."""
        if self.host_gradients is not None:
            self.host_gradients.send(reduced, first)
            self._pools[1].give(reduced)

    def close_gradients(self) -> None:
        """Write zeros for parameters without a delivery: their memory holds anything."""
        self.open_gradients()
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
        if self.host_gradients is not None:
            self.host_gradients.begun = False

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
        host = None if self.host_gradients is None else self.host_gradients.buffer.host
        own = FlatBuffer(self.reduced_gradients, {shard: self.axes.stage.optimizer}, self.shard.start, host)
        whole = torch.empty(self.numel, dtype=own.values.dtype, device=self.device)
        found = redistribute(own, FlatBuffer(whole, {}), "gradients").wait()
        partial = FlatBuffer(found, {self.axes.replica: Placement.PARTIAL})
        return redistribute(partial, FlatBuffer(found, {}), "gradients").wait()

    def take_whole(self, names: Collection[str]) -> None:
        """Let parameters rest as they are in a unit that is whole here, where somebody has changed them."""
        assert self.whole is not None, f"unit {self.layout.name} is not there"
        for interval in self.layout.intervals:
            if interval.name not in names:
                continue
            values = self.whole[interval.start : interval.stop]
            _write(values, interval.start, self.parameters.values, self.parameters.first)
            _write(values, interval.start, self.masters, self.shard.start)
        self.round_masters()

    def whole_views(self) -> list[Tensor]:
        """Return the values of all parameters of a unit that is whole here, in buffer order, as views."""
        assert self.whole is not None, f"unit {self.layout.name} is not there"
        return self._views_of(self.whole)

    def _join_host(self) -> None:
        """Queue later work behind copies to the host, which may still read the buffer."""
        if self._offload.host is not None:
            self._offload.host.join()

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


def _gaps(layout: UnitLayout, numel: int) -> Iterator[slice]:
    """Yield the elements of a buffer that belong to no parameter."""
    starts = [interval.start for interval in layout.intervals]
    stops = [interval.stop for interval in layout.intervals]
    yield from (slice(a, b) for a, b in zip([0, *stops], [*starts, numel], strict=True) if a < b)


def _view(flat: Tensor, interval: Interval) -> Tensor:
    return flat[interval.start : interval.stop].view(interval.shape)


def _write(values: Tensor, start: int, flat: Tensor, first: int) -> None:
    """Write the values of elements [start, ...) to `flat`, which holds elements [first, ...), as far as it does."""
    begin, end = max(start, first), min(start + len(values), first + len(flat))
    if begin < end:
        flat[begin - first : end - first] = values[begin - start : end - start]
