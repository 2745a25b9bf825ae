"""Map a rank's buffer to intervals of parameters, so that any grid can read a checkpoint of any other grid.

On any grid, a rank's part of a parameter is one interval of the parameter's flat order: matrices are split by rows over
the tensor axis, a unit's buffer by elements over the data axis, units over the pipeline. A checkpoint is a set of such
intervals; another grid reads the intervals that overlap with its own. Padding, of vocabulary rows or after a unit's
parameters, belongs to no interval and is never saved.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from megazero.checkpoint.manifest import WEIGHT
from megazero.comm.grid import Axis
from megazero.comm.home import PagedHome
from megazero.optim.optimizer import Run
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
    """A rank's part of the state of one unit.

    Attributes:
        pieces: the elements of parameters that the rank has.
        tensors: for each kind of values (the weight, the optimizer's states), the flat buffer that holds the pieces.
        any_value: values may be non-finite: for the model's buffers, which training does not compute.
        disks: where the flat buffers are; None: in memory.
    """

    pieces: Sequence[Piece]
    tensors: Mapping[str, Tensor]
    any_value: bool = False
    disks: PagedHome | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of values in order; none if there are no pieces."""
        return tuple(self.tensors) if self.pieces else ()


def pieces_of(
    layout: UnitLayout, held: slice, numel: Mapping[str, int], tensor: Axis, *, once: bool = False
) -> Iterator[Piece]:
    """Yield the pieces of a unit's parameters that a rank has.

    Args:
        layout: of the whole unit on this rank of the tensor axis.
        held: the rank's slice of the unit's flat buffer; `Piece.at` counts from the start of the slice.
        numel: the elements of each parameter over all ranks, without padding.
        tensor: the axis that splits matrices.
        once: yield parameters that are replicated over the tensor axis only on its first rank.
    """
    for interval in layout.intervals:
        split = interval.start < layout.tp_replicated
        if once and not split and tensor.rank > 0:
            continue
        shift = interval.first - interval.start  # element of the parameter - position in the whole flat buffer
        first = max(interval.start, held.start)
        last = min(interval.stop, held.stop, numel[interval.name] - shift)
        if first < last:
            yield Piece(interval.name, first + shift, last + shift, first - held.start)


def holdings_of(unit: Unit, runs: Sequence[Run], numel: Mapping[str, int], *, saves: bool) -> Iterator[ShardState]:
    """Yield the parts of a unit's state that this rank saves or loads: one for each run of its shard.

    Args:
        runs: the optimizer state of the elements that this rank updates; none: it updates none of them.
        numel: the elements of each parameter over all ranks, without padding.
        saves: True: the part that only this rank saves; False: all elements that it updates, to load them; the rank
            derives its other values from these.
    """
    share, disks = _share(unit) if saves else unit.shard, unit.resting.paged if unit.masters.is_meta else None
    for run in runs or [Run(slice(0, len(unit.masters)), "", {})]:
        begin = unit.shard.start + run.where.start
        first, last = max(share.start, begin), min(share.stop, unit.shard.start + run.where.stop)
        held = slice(first, max(first, last))
        pieces = tuple(pieces_of(unit.layout, held, numel, unit.axes.tensor, once=saves))
        masters = unit.masters[held.start - unit.shard.start : held.stop - unit.shard.start]
        state = {kind: flat[held.start - begin : held.stop - begin] for kind, flat in run.state.items()}
        yield ShardState(pieces, {WEIGHT: masters, **state}, disks=disks)


def _share(unit: Unit) -> slice:
    """Return the elements of a unit that this rank saves: an equal share for each rank that updates these elements."""
    shard, replica = unit.axes.shard, unit.axes.replica
    if len(unit.masters) == unit.numel:
        rank, size = replica.rank * shard.size + shard.rank, replica.size * shard.size
    else:
        rank, size = replica.rank, replica.size
    each = aligned(len(unit.masters), size) // size
    first, last = (min(unit.shard.start + place * each, unit.shard.stop) for place in (rank, rank + 1))
    return slice(first, last)
