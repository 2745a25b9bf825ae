"""Hold the values of a unit that rest on this rank between steps, each kind in one flat buffer for the whole run.

    parameters   all, or this rank's shard, in the precision that forward and backward compute with
    gradients    all, or this rank's shard
    masters      the elements that this rank updates, in the optimizer's precision; in the memory of `parameters` if
                 precision and home are equal and updates are not delayed

Each rests on the device or in another home (`offload.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megazero.comm.home import Access, Home, windows
from megazero.comm.pool import Pool, Scratch, same_place
from megazero.kernels.operations import REFERENCE, Operations
from megazero.zero.extension import Extension
from megazero.zero.layout import UnitLayout
from megazero.zero.offload import Offload
from megazero.zero.placement import FlatBuffer, Placement, Precision, UnitAxes, shard_slice

_INITIAL_PIECE = 1 << 20  # initial values that are made at a time


@dataclass(frozen=True, eq=False)
class Resources:
    """The resources that all units of a run with the same dtypes share.

    Attributes:
        precision: dtypes.
        device: the device that computes.
        wholes, partials: pools of whole parameters and of whole gradients.
        reduction: buffers of another dtype in which gradients are summed over ranks; None: use the gradients' dtype.
        offload: the homes of values that do not rest on the device.
        ops: the kernels to use if gradients are wider than parameters.
        extensions: change how values are sent between shard ranks.
    """

    precision: Precision
    device: torch.device
    wholes: Pool
    partials: Pool
    reduction: Pool | None = None
    offload: Offload = field(default_factory=Offload)
    ops: Operations = REFERENCE
    extensions: Sequence[Extension] = ()


class RestingState:
    """Hold the resting values of one unit.

    Args:
        layout: the place of each parameter in the flat buffer.
        axes: the ranks that share the unit, and the placements along them.
        trainable: it has gradients and is updated. If not, only its parameters rest here, placed by the stage.

    Attributes:
        numel: elements of the whole flat buffer, including its padding, which is always zero.
        shard: the elements that this rank updates.
        precision: the dtypes.
        parameters, gradients, masters: see above.
        own_gradients: the part of `gradients` that receives the reduced ones; None: these rest elsewhere.
        updated: the buffer where an update writes parameters in the precision of forward and backward.
        offloaded_gradients: the reduced gradients of the shard, if they do not rest on the device.
        paged: the home of values that have no data in memory (`comm/home.py`); None: all values are in memory.
    """

    def __init__(self, layout: UnitLayout, axes: UnitAxes, resources: Resources, *, trainable: bool):
        self._layout, self._axes, self._device, self.trainable = layout, axes, resources.device, trainable
        self._offload = offload = resources.offload
        self.precision = precision = resources.precision
        self.paged = offload.paged
        stage, updater = axes.stage, offload.optimizer
        self.numel = layout.padded(axes.shard.size)
        self.shard = shard_slice(self.numel, stage.optimizer, axes.shard)
        elements = shard_slice(self.numel, stage.parameters, axes.shard)
        self.parameters = self._rest(elements, precision.parameters, "parameters", offload.parameters)
        # A delayed update must not write to parameters that the step in parallel with it reads.
        apart = trainable and (updater is not offload.parameters or offload.delayed)
        self.masters = self.own_parameters
        if apart or (trainable and precision.masters != precision.parameters):
            self.masters = self._rest(self.shard, precision.masters, "optimizer", updater)
        self.offloaded_gradients: FlatBuffer | None = None
        if trainable and (home := offload.gradients(stage.gradients)) is not None:
            numel = self.shard.stop - self.shard.start
            self.offloaded_gradients = FlatBuffer(home.zeros(numel, precision.gradients, "gradients"), {}, 0, home)
        elsewhere = not trainable or (updater is not None and stage.gradients is Placement.SHARD)
        elements = slice(0, 0) if elsewhere else shard_slice(self.numel, stage.gradients, axes.shard)
        self.gradients = self._rest(elements, precision.gradients, "gradients", None)
        self.own_gradients = self.gradients.part(self.shard).values if len(self.gradients) else None
        self.updated = self._updated(precision) if apart else self.own_parameters

    def _rest(self, elements: slice, dtype: torch.dtype, category: str, home: Home | None) -> FlatBuffer:
        """Return zeros for elements that rest here: in `home`, or on the device if that is None."""
        numel = elements.stop - elements.start
        placement = Placement.SHARD if numel < self.numel else Placement.REPLICATE
        if home is not None:
            values = home.zeros(numel, dtype, category)
        else:
            self._axes.shard.comm.ledger.hold(category, numel * dtype.itemsize)
            values = torch.zeros(numel, dtype=dtype, device=self._device)
        return FlatBuffer(values, {self._axes.shard: placement}, elements.start, home)

    def _updated(self, precision: Precision) -> FlatBuffer:
        """Return `updated` for masters in memory of their own: own_parameters, a new host buffer, or the masters."""
        offload, on_disks = self._offload, self.masters.values.is_meta
        if on_disks and (offload.parameters is not None or offload.host is None):
            return self.own_parameters
        through = offload.host if on_disks else offload.optimizer
        if through is not None and (on_disks or precision.masters != precision.parameters):
            return self._rest(self.shard, precision.parameters, "parameters", through)
        return self.masters

    @property
    def own_parameters(self) -> FlatBuffer:
        """Return the parameters that this rank updates, in the precision of forward and backward."""
        return self.parameters.part(self.shard, {self._axes.shard: self._axes.stage.optimizer})

    def new_state(self, numel: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return zeros for optimizer state: `numel` values, on the home of the masters; by default in their dtype."""
        home, dtype = self._offload.optimizer, dtype or self.masters.values.dtype
        if self.masters.values.is_meta or home is None:
            return self._rest(slice(0, numel), dtype, "optimizer", home).values
        self._axes.shard.comm.ledger.hold("host_optimizer", numel * dtype.itemsize)
        return torch.zeros(numel, dtype=dtype)  # only the host reads and writes it: pinned pages would cost more

    @property
    def updates_on(self) -> torch.device:
        """Return the device that updates the unit: the one that holds the masters; the host, if disks hold them."""
        return torch.device("cpu") if self.masters.values.is_meta else self.masters.values.device

    def staging(self, scratch: Scratch, name: str, numel: int) -> Tensor:
        """Return memory in the dtype of updates, for copies of values of a piece that is updated."""
        category = "staging" if self._offload.optimizer is None else "host_staging"
        return scratch.take(name, category, numel, self.precision.update, self.updates_on)

    def fill(self, initial: Callable[[str, int, int], Tensor]) -> None:
        """Write the initial values that rest here; `initial(name, start, stop)` gives an interval of one parameter."""
        first = min(self.parameters.first, self.shard.start)
        last = max(self.parameters.elements.stop, self.shard.stop)
        for interval in self._layout.intervals:
            end = min(interval.stop, last)
            start = max(interval.start, first)
            while start < end:
                stop = min(first + ((start - first) // _INITIAL_PIECE + 1) * _INITIAL_PIECE, end)
                values = initial(interval.name, start - interval.start, stop - interval.start)
                # Rounded as an update rounds, because a skipped update leaves `updated` as it is.
                self.write(values.to(self.masters.values.dtype), start)
                start = stop
        if self.paged is not None:
            self.paged.settle()

    def write(self, values: Tensor, start: int) -> None:
        """Write the values of elements [start, ...) to all buffers that have parameters, as far as they rest here."""
        self.parameters.write(values, start)
        own, masters, updated = (one.values for one in (self.own_parameters, self.masters, self.updated))
        if not same_place(masters, own):
            self.masters.write(values, start)
        if not same_place(updated, own) and not same_place(updated, masters):
            self.updated.write(values, start)

    def round_masters(self) -> None:
        """Write the masters to `updated`, rounded to the precision of forward and backward."""
        if same_place(self.updated.values, self.masters.values):
            return
        both: list[tuple[Tensor, Access]] = [(self.masters.values, "read"), (self.updated.values, "write")]
        for _, (masters, updated) in windows(self.paged, both, "optimizer"):
            updated.copy_(masters)

    @property
    def reduced_gradients(self) -> Tensor:
        """Return the reduced gradients that the update reads at the end of a step, where they rest."""
        if self.offloaded_gradients is not None:
            return self.offloaded_gradients.values
        assert self.own_gradients is not None, f"unit {self._layout.name} has no gradients"
        return self.own_gradients

    @property
    def window(self) -> int:
        """Return the number of elements that `update_windows` yields at a time; windows begin at multiples of it."""
        return max(self.numel, 1) if self.paged is None else self.paged.window

    def update_windows(self, state: Mapping[str, Tensor], skip: Tensor) -> Iterator[tuple[slice, list[Tensor]]]:
        """Yield the values of this rank's shard that an update reads and writes, window by window.

        Args:
            state: the optimizer's state of each element, by name.
            skip: 0-dim; 1: nothing will change, so values in a paged home are not even read.

        Yields:
            (slice of the shard; masters, reduced gradients, each state, and `updated`, which may be the masters).
        """
        flats: list[tuple[Tensor, Access]] = [(self.masters.values, "update"), (self.reduced_gradients, "read")]
        flats.extend((each, "update") for each in state.values())
        apart = not same_place(self.updated.values, self.masters.values)
        if apart:
            flats.append((self.updated.values, "write"))
        for where, window in windows(self.paged, flats, "optimizer", skip):
            yield where, window if apart else [*window, window[0]]
