"""One unit: what of its parameters and gradients rests on this rank, and the model's parameters as views of it.

Whatever rests is allocated once and kept for the whole run, each kind in one flat buffer, on the device or on the host
(`offload.py`):

    parameters   all, or this rank's shard, in the precision that forward and backward compute with
    gradients    all, or this rank's shard
    masters      the elements that this rank updates, in the optimizer's precision: the same memory as `parameters`
                 where that is the same

What does not rest whole is whole for a while in a buffer of the pool: gathered parameters (`whole`) between `attach`
and `detach`, the gradients of one micro-batch (`partial`) from the first that is delivered until they are reduced.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megazero.comm.pool import Pool, same_place
from megazero.kernels.operations import REFERENCE, Operations
from megazero.zero.gradients import DeliveryCounter, GradientAccumulator
from megazero.zero.layout import Interval, UnitLayout
from megazero.zero.offload import HostGradients, Offload
from megazero.zero.placement import ParallelAxes, Placement, Precision, shard_slice

# Initial values are made in intervals of this many elements: bounds the fp64 working memory to some 10 MB.
_INITIAL_PIECE = 1 << 20


class Unit:
    """The parameters that are kept, moved and updated together.

    Args:
        layout: who lies where.
        spread: the ranks that share it, and what rests where.
        precision: dtypes.
        device: of everything that computes.
        pools: for whole parameters and whole gradients.
        offload: what rests on the host; None: nothing.
        shared: the first and the last stage of a pipeline both have it, on different ranks.
        ops: the kernels to use, where gradients are wider than parameters.

    Attributes:
        numel: elements of the whole flat buffer with its padding, which is zero and stays so.
        shard: the elements that this rank updates.
        whole: all parameters, while this rank has them.
        partial: this rank's gradients of all parameters, while it has them.
        updated: where an update leaves the parameters as forward and backward see them, or will: the masters
            themselves, what rests here, or memory of the host from where they depart.
    """

    def __init__(
        self,
        layout: UnitLayout,
        axes: ParallelAxes,
        precision: Precision,
        device: torch.device,
        pools: tuple[Pool, Pool],
        offload: Offload | None = None,
        *,
        shared: bool = False,
        ops: Operations = REFERENCE,
    ):
        self.layout, self._pools, self._offload = layout, pools, offload
        self.device, self.shared = device, shared
        stage, data, ledger = axes.stage, axes.data, axes.data.comm.ledger
        updates_there = offload is not None and offload.optimizer
        rests_there = offload is not None and offload.parameters
        self.numel = layout.padded(data.size)
        self.shard = shard_slice(self.numel, stage.optimizer, data)
        resting = shard_slice(self.numel, stage.parameters, data)
        self._first = resting.start

        def zeros(elements: slice, dtype: torch.dtype, category: str, there: bool = False) -> Tensor:
            numel = elements.stop - elements.start
            if there and offload is not None:
                return offload.host.zeros(numel, dtype, category)
            ledger.hold(category, numel * dtype.itemsize)
            return torch.zeros(numel, dtype=dtype, device=device)

        self.parameters = zeros(resting, precision.parameters, "parameters", rests_there)
        self.masters = self.own_parameters
        # A delayed update may not touch what the step beside it sees.
        apart = updates_there != rests_there or (offload is not None and offload.delayed)
        if precision.masters != precision.parameters or apart:
            self.masters = zeros(self.shard, precision.masters, "optimizer", updates_there)
        self.host_gradients = None
        if offload is not None and offload.optimizer:
            self.host_gradients = HostGradients(offload.host, len(self.masters), precision.gradients)
        parks = updates_there and stage.gradients is Placement.SHARD
        resting_gradients = slice(0, 0) if parks else shard_slice(self.numel, stage.gradients, data)
        self.gradients = zeros(resting_gradients, precision.gradients, "gradients")
        self.updated = self.masters if apart else self.own_parameters
        if updates_there and apart and precision.masters != precision.parameters:
            self.updated = zeros(self.shard, precision.parameters, "parameters", there=True)
        # A stage 3 shard on the host that is the whole, with one data rank, still has to come.
        self.whole: Tensor | None = None if rests_there or len(self.parameters) < self.numel else self.parameters
        self.partial: Tensor | None = self.gradients if self.gradients_rest_whole else None
        self._share: Tensor | None = None
        self.deliveries = DeliveryCounter(layout.name)
        self.views = {i.name: GradientAccumulator(self, i.name, ops) for i in layout.intervals}
        self._members: list[tuple[Interval, nn.Parameter]] = []
        self._nothing = torch.empty(0, dtype=precision.parameters, device=device)
        if self.partial is not None:
            self._show_gradients()

    @property
    def parameters_rest_whole(self) -> bool:
        """On the device."""
        there = self._offload is not None and self._offload.parameters
        return len(self.parameters) == self.numel and not there

    @property
    def gradients_rest_whole(self) -> bool:
        """On the device."""
        return len(self.gradients) == self.numel

    @property
    def own_parameters(self) -> Tensor:
        """Those that this rank updates, as forward and backward see them."""
        return self.parameters[self.shard.start - self._first : self.shard.stop - self._first]

    @property
    def own_gradients(self) -> Tensor:
        """Where the reduced gradients of what this rank updates end up on the device."""
        if self.gradients_rest_whole:
            return self.gradients[self.shard]
        if len(self.gradients):
            return self.gradients
        share = self._share if self._share is not None else self.partial
        assert share is not None, f"the gradients of unit {self.layout.name} are on the host"
        return share

    @property
    def reduced_gradients(self) -> Tensor:
        """The same where the update finds them, at the end of a step: on the device or on the host."""
        return self.own_gradients if self.host_gradients is None else self.host_gradients.gradients

    def fill(self, initial: Callable[[str, int, int], Tensor]) -> None:
        """Writes initial values of what rests here; `initial(name, start, stop)` gives an interval of one parameter."""
        first = min(self._first, self.shard.start)
        last = max(self._first + len(self.parameters), self.shard.stop)
        for interval in self.layout.intervals:
            end = min(interval.stop, last)
            for start in range(max(interval.start, first), end, _INITIAL_PIECE):
                stop = min(start + _INITIAL_PIECE, end)
                values = initial(interval.name, start - interval.start, stop - interval.start)
                values = values.to(
                    self.masters.dtype
                )  # rounded as an update rounds, so that a skipped one changes nothing
                _write(values, start, self.parameters, self._first)
                if not same_place(self.masters, self.own_parameters):
                    _write(values, start, self.masters, self.shard.start)
        self.round_masters()  # an update that is skipped leaves there what there is

    def make_parameters(self) -> dict[str, nn.Parameter]:
        """What the model has to see as its parameters: views of this unit's memory, wherever that will be."""
        for interval in self.layout.intervals:
            parameter = nn.Parameter(self._nothing if self.whole is None else _view(self.whole, interval))
            parameter.gradient_slot = self.views[interval.name]  # type: ignore[attr-defined]
            self._members.append((interval, parameter))
        return {interval.name: parameter for interval, parameter in self._members}

    def allocate_unsharded(self) -> Tensor:
        """A buffer for all parameters, with this rank's own in their place."""
        whole = self._pools[0].take(self.numel)
        if self._offload is not None and self._offload.parameters:
            self._offload.host.bring(self.parameters, whole[self.shard], "parameters")
        else:
            whole[self.shard].copy_(self.parameters)
        return whole

    def install(self, whole: Tensor) -> None:
        """The model sees its parameters in this buffer, from `borrow`."""
        assert self.whole is None, f"unit {self.layout.name} is there already"
        self.whole = whole
        for interval, parameter in self._members:
            parameter.data = _view(whole, interval)

    def release(self) -> None:
        """The gathered parameters are gone, and whoever touches one sees an empty tensor."""
        if self.parameters_rest_whole or self.whole is None:
            return
        self._pools[0].give(self.whole)
        self.whole = None
        for _, parameter in self._members:
            parameter.data = self._nothing

    def round_masters(self) -> None:
        """What forward and backward see of the masters is in `updated`."""
        if not same_place(self.updated, self.masters):
            self.updated.copy_(self.masters)

    def depart(self) -> None:
        """What has been updated goes where it rests, if it rests elsewhere."""
        offload, own = self._offload, self.own_parameters
        if offload is None or same_place(self.updated, own):
            return
        if offload.optimizer and offload.parameters:
            own.copy_(self.updated)
        elif offload.optimizer:
            offload.host.bring(self.updated, own, "parameters")
        else:
            offload.host.send(self.updated.to(own.dtype), own, "parameters")

    def open_gradients(self) -> None:
        """Makes sure that there is a place for gradients of all parameters."""
        if self.partial is not None:
            return
        self.partial = self._pools[1].take(self.numel)
        self._show_gradients()
        if self._offload is not None:
            self._offload.host.join()  # what was here may still be on its way to the host
        if self.host_gradients is not None and self.host_gradients.begun and len(self.masters) == self.numel:
            self.host_gradients.bring(self.partial)  # with one data rank gradients gather here, and nowhere else
            for view in self.views.values():
                view.fresh = False
        else:
            self._clear_padding(self.partial)

    def open_share(self, *, accumulate: bool) -> None:
        """Makes sure that there is a place for the reduced gradients, with what has gathered of them if asked for."""
        if self.gradients_rest_whole or len(self.gradients):
            return
        assert self._offload is not None and self.host_gradients is not None
        self._share = self._pools[1].take(len(self.masters))
        self._offload.host.join()
        if accumulate:
            self.host_gradients.bring(self._share)

    def park(self) -> None:
        """The gradients have been reduced: they go to where the update is."""
        if self.host_gradients is not None:
            self.host_gradients.send(self.own_gradients)
        if self._share is not None:
            self._pools[1].give(self._share)
            self._share = None

    def take_reduced(self, first: int) -> Tensor:
        """Reduced gradients of elements [first, ...) of the shard, on the device; `put_reduced` has to follow."""
        if self.host_gradients is None:
            return self.own_gradients[first:]
        reduced = self._pools[1].take(len(self.masters) - first)
        self.host_gradients.bring(reduced, first)
        return reduced

    def put_reduced(self, first: int, reduced: Tensor) -> None:
        """What has become of them."""
        if self.host_gradients is not None:
            self.host_gradients.send(reduced, first)
            self._pools[1].give(reduced)

    def close_gradients(self) -> None:
        """A parameter that no delivery has reached has a zero gradient, not what the memory held before."""
        self.open_gradients()
        for view in self.views.values():
            view.close()

    def drop_gradients(self) -> None:
        """The partial gradients have been reduced: their place is free."""
        if self.partial is not None and not self.gradients_rest_whole:
            self._pools[1].give(self.partial)
            self.partial = None
        self.forget_gradients()

    def begin_step(self) -> None:
        """What gradients there are belong to a step that is past."""
        self.deliveries.clear()
        self.forget_gradients()
        if self.host_gradients is not None:
            self.host_gradients.begun = False

    def forget_gradients(self) -> None:
        """The next delivery to each parameter is the first."""
        for view in self.views.values():
            view.fresh = True

    def parameter(self, name: str) -> Tensor:
        """The values of one parameter of a unit that is there, as a view."""
        assert self.whole is not None, f"unit {self.layout.name} is not there"
        return _view(self.whole, next(i for i in self.layout.intervals if i.name == name))

    def name_at(self, position: int) -> str:
        """The parameter that an element of the flat buffer belongs to."""
        return next(i.name for i in reversed(self.layout.intervals) if i.start <= position)

    def _show_gradients(self) -> None:
        assert self.partial is not None
        for interval in self.layout.intervals:
            self.views[interval.name].view = _view(self.partial, interval)

    def _clear_padding(self, flat: Tensor) -> None:
        stop = 0
        for interval in self.layout.intervals:
            flat[stop : interval.start].zero_()
            stop = interval.stop
        flat[stop:].zero_()


def _view(flat: Tensor, interval: Interval) -> Tensor:
    return flat[interval.start : interval.stop].view(interval.shape)


def _write(values: Tensor, start: int, flat: Tensor, first: int) -> None:
    """Puts the values of elements [start, ...) into `flat`, which holds elements [first, ...), as far as it does."""
    begin, end = max(start, first), min(start + len(values), first + len(flat))
    if begin < end:
        flat[begin - first : end - first] = values[begin - start : end - start]
