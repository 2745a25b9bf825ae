"""What rests where: a ZeRO stage is a row of a table, a communication is a change of placement.

    | stage | parameters | gradients                   | optimizer state |
    |-------|------------|-----------------------------|-----------------|
    | 0     | Replicate  | Partial -> all-reduce       | Replicate       |
    | 1     | Replicate  | Partial -> reduce-scatter   | Shard           |

Rajbhandari et al. 2019 (ZeRO), section 5: the ranks of the data axis hold replicas of the parameters, and each computes
the gradients of its own samples (Partial: the sum over the ranks is meant). Gradients go to where the optimizer state
is; updated parameters come from there. A rank's shard is one of `size` equal intervals of a unit's flat buffer.
"""

from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from megazero.parallel.collectives import all_gather_in_place, all_reduce, reduce_scatter_in_place
from megazero.parallel.grid import Axis


class Placement(Enum):
    """Where a flat buffer's meaning lies along the data axis."""

    REPLICATE = "every rank holds all of it"
    PARTIAL = "the sum over all ranks is meant"
    SHARD = "each rank holds its own interval"


@dataclass(frozen=True)
class Stage:
    """Where parameters, gradients and optimizer state rest between their uses."""

    parameters: Placement
    gradients: Placement
    optimizer: Placement


STAGES = {
    0: Stage(Placement.REPLICATE, Placement.PARTIAL, Placement.REPLICATE),
    1: Stage(Placement.REPLICATE, Placement.PARTIAL, Placement.SHARD),
}


def held(numel: int, placement: Placement, axis: Axis) -> slice:
    """The elements of a flat buffer of `numel` (a multiple of the axis' size) that a rank may rely on."""
    if placement is not Placement.SHARD:
        return slice(0, numel)
    part = numel // axis.size
    return slice(axis.rank * part, (axis.rank + 1) * part)


def change(flat: Tensor, before: Placement, after: Placement, axis: Axis, purpose: str) -> None:
    """Brings a flat buffer from one placement to another, in place."""
    if before is not after:
        _CHANGES[before, after](flat, axis, purpose)


_CHANGES = {
    (Placement.PARTIAL, Placement.REPLICATE): all_reduce,
    (Placement.PARTIAL, Placement.SHARD): reduce_scatter_in_place,
    (Placement.SHARD, Placement.REPLICATE): all_gather_in_place,
}
