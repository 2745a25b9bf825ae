"""Join the three parts of a unit: the values that rest, the parameters that the model sees, and the gradients."""

from collections.abc import Callable

from megazero.zero.layout import UnitLayout
from megazero.zero.placement import Placement, UnitAxes
from megazero.zero.resting import Resources, RestingState
from megazero.zero.unit_gradients import UnitGradients
from megazero.zero.unit_parameters import UnitParameters

_WORDS = {Placement.REPLICATE: "all", Placement.PARTIAL: "all", Placement.SHARD: "1/{size}"}


class Unit:
    """The parameters that are stored, communicated and updated together.

    Args:
        layout: the place of each parameter in the flat buffer.
        axes: the ranks that share the unit, and the placements along them.
        resources: dtypes, device, pools, homes and extensions, which it shares with other units.
        trainable: it has gradients and is updated. If not, only its parameters rest here, placed by the stage.

    Attributes:
        resting: the values that rest on this rank.
        parameters: the parameters that forward and backward use.
        gradients: the gradients that arrive in backward.
        numel: elements of the whole flat buffer, including its padding, which is always zero.
        shard: the elements that this rank updates.
        masters: the values that the optimizer updates, flat.
    """

    def __init__(self, layout: UnitLayout, axes: UnitAxes, resources: Resources, *, trainable: bool = True):
        self.layout, self.axes, self.trainable = layout, axes, trainable
        self.name, self.device = layout.name, resources.device
        self.resting = resting = RestingState(layout, axes, resources, trainable=trainable)
        self.numel, self.shard, self.masters = resting.numel, resting.shard, resting.masters.values
        self.gradients = UnitGradients(layout, axes, resting, resources)
        self.parameters = UnitParameters(layout, axes, resting, resources, self.gradients.views)

    @property
    def visiting_bytes(self) -> int:
        """Return the bytes of whole parameters and gradients that are here temporarily and do not rest here."""
        whole = None if self.parameters.rest_whole else self.parameters.whole
        partial = None if self.gradients.rest_whole else self.gradients.partial
        return sum(values.nbytes for values in (whole, partial) if values is not None)

    def listen(self, listener: Callable[[str], object]) -> None:
        """Register a listener, called with "gather" or "reduce" (each a start), "gathered", "reduced" or "released"."""
        self.parameters.on_event = self.gradients.on_event = listener


def resting_table(units: list[Unit]) -> str:
    """Return lines of text: bytes of parameters, gradients and optimizer state here, in all and per parameter.

    The parameters counted are those of this rank's part of the model, without padding.
    """
    axes = units[0].axes
    held, stage = axes.shard.comm.ledger.bytes, axes.stage
    parameters = sum(interval.stop - interval.start for unit in units for interval in unit.layout.intervals)
    lines = []
    placements = {"parameters": stage.parameters, "gradients": stage.gradients, "optimizer": stage.optimizer}
    for name, placement in placements.items():
        places = (name, f"host_{name}", f"nvme_{name}")
        here, there, disk = (held[place].now if place in held else 0 for place in places)
        size, share = here + there + disk, _WORDS[placement].format(size=axes.shard.size)
        lines.append(f"  {name:<11}{share:>6}{size / 1e6:>10,.1f} MB{size / parameters:>8.2f} bytes per parameter")
        if there:
            lines.append(f"  {'on the host':<17}{there / 1e6:>10,.1f} MB of these")
        if disk:
            lines.append(f"  {'on disks':<17}{disk / 1e6:>10,.1f} MB of these")
    return "\n".join(lines)
