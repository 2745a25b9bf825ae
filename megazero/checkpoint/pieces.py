"""Map a rank's buffer to intervals of parameters, so that any grid reads what any grid wrote.

Every part of a parameter that a rank has is one interval of the parameter's flat order, whatever the grid: matrices
are split by rows over the tensor axis, a unit's buffer by elements over the data axis, units over the pipeline. A
checkpoint is a set of such intervals; reading one on another grid is finding those that overlap. Padding, of
vocabulary rows or after a unit's parameters, belongs to no interval: it is never saved.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from megazero.checkpoint.manifest import WEIGHT
from megazero.comm.grid import Axis
from megazero.comm.home import PagedHome
from megazero.plan.placements import aligned
from megazero.zero.layout import UnitLayout
from megazero.zero.unit import Unit


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of a parameter's flat order, at [at, at + stop - start) of a buffer."""

    name: str
    start: int
    stop: int
    at: int


@dataclass(frozen=True, eq=False)
class ShardState:
    """The state of one unit that a rank has.

    Attributes:
        pieces: which elements of which parameters.
        tensors: by kind the flat buffer that holds the pieces.
        any_value: they need not be finite: buffers, which training does not make.
        disks: where the buffers are, if they are not in memory.
    """

    pieces: Sequence[Piece]
    tensors: Mapping[str, Tensor]
    any_value: bool = False
    disks: PagedHome | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds that there is something of, in their order."""
        return tuple(self.tensors) if self.pieces else ()


def pieces_of(
    layout: UnitLayout, held: slice, numel: Mapping[str, int], tensor: Axis, *, once: bool = False
) -> Iterator[Piece]:
    """Yield the pieces of a unit's parameters that a rank has.

    Args:
        layout: of the whole unit on this rank of the tensor axis.
        held: the elements of its flat buffer that the rank has; `Piece.at` counts from its start.
        numel: of each parameter the elements over all ranks, without padding.
        tensor: the axis that its matrices are split over.
        once: leave out, except on the tensor axis' first rank, parameters that all its ranks have alike.
    """
    for interval in layout.intervals:
        split = interval.start < layout.tp_replicated
        if once and not split and tensor.rank > 0:
            continue
        shift = interval.first - interval.start  # from positions in the whole flat buffer to elements of the parameter
        first = max(interval.start, held.start)
        last = min(interval.stop, held.stop, numel[interval.name] - shift)
        if first < last:
            yield Piece(interval.name, first + shift, last + shift, first - held.start)


def holding_of(unit: Unit, state: Mapping[str, Tensor], numel: Mapping[str, int], *, saves: bool) -> ShardState:
    """Return the state of a unit that a rank saves, or that it updates, from which the rest follows.

    Args:
        state: what the optimizer keeps of each element that this rank updates.
        numel: of each parameter the elements over all ranks, without padding.
        saves: the share that only this rank saves; False: everything that it updates.
    """
    share = _share(unit) if saves else unit.shard
    pieces = tuple(pieces_of(unit.layout, share, numel, unit.axes.tensor, once=saves))
    within = slice(share.start - unit.shard.start, share.stop - unit.shard.start)
    tensors = {kind: flat[within] for kind, flat in {WEIGHT: unit.masters, **state}.items()}
    return ShardState(pieces, tensors, disks=unit.resting.paged if unit.masters.is_meta else None)


def _share(unit: Unit) -> slice:
    """Return the elements of a unit that this rank saves: those that it updates, shared out among ranks that do too."""
    shard, replica = unit.axes.shard, unit.axes.replica
    if len(unit.masters) == unit.numel:
        rank, size = replica.rank * shard.size + shard.rank, replica.size * shard.size
    else:
        rank, size = replica.rank, replica.size
    each = aligned(len(unit.masters), size) // size
    first, last = (min(unit.shard.start + place * each, unit.shard.stop) for place in (rank, rank + 1))
    return slice(first, last)
