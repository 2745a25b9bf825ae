"""Gather the parameters of a unit, show them to the model, and free them.

If parameters do not rest whole, a buffer of the pool holds them between `install` and `release`, and the model's
parameters are views of this buffer. At other times they are empty tensors.
"""

from collections.abc import Callable, Collection, Iterable, Mapping

import torch
from torch import Tensor, nn

from megazero.comm.collectives import Pending
from megazero.zero.extension import Gathering
from megazero.zero.gradients import GradientAccumulator
from megazero.zero.layout import Interval, UnitLayout
from megazero.zero.placement import FlatBuffer, UnitAxes, redistribute
from megazero.zero.resting import Resources, RestingState

Slots = Mapping[str, GradientAccumulator]


class UnitParameters:
    """The parameters of one unit, as forward and backward use them.

    Args:
        slots: receive the gradients, one for each parameter.

    Attributes:
        rest_whole: all of them rest on the device.
        whole: all parameters, flat, while this rank has them; else None.
        gathering: how they are gathered, if they do not rest whole.
        on_event: called with "gather", "gathered" and "released" when these happen.
    """

    def __init__(self, layout: UnitLayout, axes: UnitAxes, resting: RestingState, resources: Resources, slots: Slots):
        self._layout, self._resting, self._slots = layout, resting, slots
        # With one shard rank an offloaded stage 3 shard is the whole unit, but must still be copied to the device.
        self.rest_whole = len(resting.parameters) == resting.numel and resources.offload.parameters is None
        self.gathering = Gathering(resources.precision.parameters)
        for extension in () if self.rest_whole else resources.extensions:
            self.gathering = extension.gathering(self.gathering, resting.numel, axes, resources.device)
        self._pool, self._offload = resources.wholes, resources.offload
        self._one_pool = resources.wholes is resources.partials
        self.on_event: Callable[[str], object] = lambda event: None
        self.whole: Tensor | None = resting.parameters.values if self.rest_whole else None
        self._members: list[nn.Parameter] = []  # in buffer order
        self._views: dict[int, list[Tensor]] = {}  # views in each buffer of the pool, by its storage
        self._nothing = torch.empty(0, dtype=resources.precision.parameters, device=resources.device)

    @property
    def version(self) -> int:
        """Return how often parameters that are whole here were changed in place, as parameters or in the buffer."""
        return self._there()._version + sum(parameter._version for parameter in self._members)

    def make(self) -> dict[str, nn.Parameter]:
        """Return the model's parameters by name: views of the memory that `install` and `release` move."""
        return self.move_to([nn.Parameter(self._nothing, requires_grad=self._resting.trainable) for _ in self._slots])

    def move_to(self, parameters: list[nn.Parameter]) -> dict[str, nn.Parameter]:
        """Make these parameters, in buffer order, the views of this unit's memory; return them by name."""
        self._members = parameters
        for parameter, slot in zip(parameters, self._slots.values(), strict=True):
            parameter.gradient_slot = slot  # type: ignore[attr-defined]
        self._show(self._nothing if self.whole is None else view(self.whole, i) for i in self._layout.intervals)
        return dict(zip(self._slots, parameters, strict=True))

    def _show(self, values: Iterable[Tensor]) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # a subclass may watch what others do with parameters
            for parameter, own in zip(self._members, values, strict=True):
                parameter.data = own

    def start_gather(self) -> tuple[Tensor, Pending]:
        """Start to gather all parameters; return (a buffer of the pool, to `install` on arrival; the operation)."""
        self.on_event("gather")
        if self._one_pool:
            self._offload.join()  # a send may still read gradients in the buffer
        whole = FlatBuffer(self._pool.take(self._resting.numel), {})
        return whole.values, self.gathering.start(self._resting.parameters, whole)

    def expect(self) -> None:
        """Start to read parameters that rest in a paged home, because they will be gathered soon."""
        shard = self._resting.parameters.values
        if shard.is_meta and self._resting.paged is not None and self.gathering.reads_shard:
            self._resting.paged.expect(shard)

    def install(self, whole: Tensor) -> None:
        """Make the model's parameters views of this buffer, which is from `start_gather`."""
        assert self.whole is None, f"unit {self._layout.name} is there already"
        self.whole = whole
        self._show(views_of(whole, self._layout, self._views))
        self.on_event("gathered")

    def release(self) -> None:
        """Free the gathered parameters, unless they rest whole; the model's parameters become empty tensors."""
        if self.rest_whole or self.whole is None:
            return
        self._pool.give(self.whole)
        self.whole = None
        self._show([self._nothing] * len(self._members))
        self.on_event("released")

    def send_updated(self) -> None:
        """Copy updated parameters to where they rest, if `updated` is other memory."""
        self.gathering.forget()
        redistribute(self._resting.updated, self._resting.own_parameters, "parameters")

    @property
    def publishes(self) -> bool:
        """Return whether this rank updates only a part of parameters that rest whole."""
        return self.rest_whole and len(self._resting.masters) < self._resting.numel

    def start_publish(self) -> tuple[Tensor, Pending]:
        """Start to gather the updated parameters where all of them rest; return (that memory, the operation)."""
        parameters = self._resting.parameters
        return parameters.values, redistribute(self._resting.own_parameters, parameters, "parameters")

    def values(self) -> list[Tensor]:
        """Return the values of all parameters that are whole here, in buffer order, as views."""
        return views_of(self._there(), self._layout, self._views)

    def value(self, name: str) -> Tensor:
        """Return the values of one parameter of a unit that is whole here, as a view."""
        return view(self._there(), next(i for i in self._layout.intervals if i.name == name))

    def keep_changes(self, names: Collection[str]) -> None:
        """Write parameters that the caller has changed, in a unit that is whole here, to the memory where they rest."""
        whole = self._there()
        for interval in self._layout.intervals:
            if interval.name in names:
                self._resting.write(whole[interval.start : interval.stop], interval.start)
        self._offload.join()
        self.gathering.forget()

    def _there(self) -> Tensor:
        assert self.whole is not None, f"unit {self._layout.name} is not there"
        return self.whole


def views_of(flat: Tensor, layout: UnitLayout, known: dict[int, list[Tensor]]) -> list[Tensor]:
    """Return each parameter's view in a buffer; `known` caches the views, because a pool reuses its buffers."""
    key = flat.untyped_storage()._cdata
    if key not in known:
        known[key] = [view(flat, interval) for interval in layout.intervals]
    return known[key]


def view(flat: Tensor, interval: Interval) -> Tensor:
    """Return the view of a parameter in a unit's whole flat buffer."""
    return flat[interval.start : interval.stop].view(interval.shape)
