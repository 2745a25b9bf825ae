"""Write the table of what rests on a rank between steps: the stage's placements, with their measured bytes."""

from megazero.zero.placement import Placement
from megazero.zero.unit import Unit

_WORDS = {Placement.REPLICATE: "all", Placement.PARTIAL: "all", Placement.SHARD: "1/{size}"}


def resting_table(units: list[Unit]) -> str:
    """Return three lines: the bytes of parameters, gradients and optimizer state here, in all and per parameter.

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
