"""Map a rank's buffer to intervals of parameters, so that any grid reads what any grid wrote.

Every part of a parameter that a rank has is one interval of the parameter's flat order, whatever the grid: matrices
are split by rows over the tensor axis, a unit's buffer by elements over the data axis, units over the pipeline. A
checkpoint is a set of such intervals; reading one on another grid is finding those that overlap. Padding, of
vocabulary rows or behind a unit's parameters, belongs to no interval: it is never saved.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megazero.comm.grid import Axis
from megazero.zero.layout import UnitLayout


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of a parameter's flat order, at [at, at + stop - start) of a buffer."""

    name: str
    start: int
    stop: int
    at: int

    def within(self, start: int, stop: int) -> "Piece | None":
        """Return the part of this piece in [start, stop) of the parameter, None if they do not overlap."""
        first, last = max(self.start, start), min(self.stop, stop)
        return Piece(self.name, first, last, self.at + first - self.start) if first < last else None


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
