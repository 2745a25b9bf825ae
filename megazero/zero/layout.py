"""Lay out the parameters of a unit in its flat buffer.

A unit (one block, or the embedding, or the head) has one flat buffer. Parameters that are split over the tensor axis
come first, then those that every tensor rank holds whole (norms, biases of row-parallel weights, learned positions);
the last of these are those that each rank uses only on its own heads. In each of the three zones, parameters with one
update rule are next to each other: those of whole matrices first, then those with weight decay:

    | split: matrices | decayed | not decayed | whole, from tp_replicated on | from tp_partial on |

(with a few elements of padding after each parameter, always zero and never saved)

so that

- an optimizer makes few fused calls: one for each rule in a zone,
- if a rank's gradients of the last part are sums over its own tokens only (sequence parallelism) or its own heads,
  one all-reduce of that part over the tensor axis completes them, and the norm counts them once,
- collectives, norms and copies run on contiguous memory,
- any part of any parameter is an interval (parameter, start, stop) of the buffer, and a checkpoint written on one
  grid is read on another by the overlap of intervals,
- if values are quantised for sending (`zero.quantize`), each parameter begins with a block of its own: a bias does not
  share the scale of a norm's ones, and codes are equal on every rank that holds the parameter, for any number of data
  ranks.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megazero.plan.matrices import Matrix
from megazero.plan.optimizers import order
from megazero.plan.placements import ALIGNMENT, aligned


@dataclass(frozen=True)
class Group:
    """The update rule of parameters that are next to each other.

    Attributes:
        decay: the weight decay.
        lr_factor: multiplies the learning rate.
        optimizer: the name of the optimizer that updates them.
        number: the number of the user's group that they are in; -1: in none.
        clip: the number of the gradient norm by which they are clipped; 0: the norm of all that have no other.
    """

    decay: float
    lr_factor: float = 1.0
    optimizer: str = "adamw"
    number: int = -1
    clip: int = 0

    @property
    def place(self) -> tuple[object, ...]:
        """Return a key that sorts groups in a zone of a flat buffer."""
        return (*order(self.optimizer, self.number), not self.decay)


@dataclass(frozen=True)
class Entry:
    """A parameter, or a part of one, to be laid out.

    Attributes:
        name: the parameter's full name.
        shape: the shape of this rank's part.
        group: its update rule.
        split: it is split over the tensor axis.
        partial: it is whole, and each rank of the tensor axis has a part of its gradient.
        first: the element at which it begins in the flat order of the whole parameter, over all ranks.
        matrix: the matrices of the whole parameter, if it is a weight inside of a block.
    """

    name: str
    shape: tuple[int, ...]
    group: Group
    split: bool
    first: int = 0
    partial: bool = False
    matrix: Matrix | None = None


@dataclass(frozen=True)
class Interval:
    """The place of an `Entry`: elements [start, stop) of the unit's flat buffer."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    first: int = 0
    matrix: Matrix | None = None


@dataclass(frozen=True)
class UnitLayout:
    """The flat buffer of one unit.

    Attributes:
        name: the unit's name, for messages and profiles.
        intervals: every parameter once, in buffer order.
        groups: each with the element at which it begins; it ends where the next one begins, padding included.
        tp_replicated: elements [tp_replicated, numel) are whole on every rank of the tensor axis.
        tp_partial: each tensor rank has a part of the gradient of elements [tp_partial, numel), even without
            sequence parallelism; None: there are no such elements.
        aligned: the number of elements, including the padding after the last parameter.
        alignment: every parameter and every shard begins at a multiple of so many elements.
    """

    name: str
    intervals: tuple[Interval, ...]
    groups: tuple[tuple[Group, int], ...]
    tp_replicated: int
    aligned: int
    alignment: int = ALIGNMENT
    tp_partial: int | None = None

    @property
    def numel(self) -> int:
        """Return the number of elements, padding between parameters included, without the padding at the end."""
        return self.intervals[-1].stop

    def padded(self, parts: int) -> int:
        """Return the number of elements with the padding that lets `parts` ranks have equal shards."""
        return aligned(self.aligned, parts, self.alignment)

    def padding(self, numel: int) -> Iterator[slice]:
        """Yield the elements of a buffer of `numel` that belong to no parameter."""
        starts = [interval.start for interval in self.intervals]
        stops = [interval.stop for interval in self.intervals]
        yield from (slice(a, b) for a, b in zip([0, *stops], [*starts, numel], strict=True) if a < b)

    def group_slices(self, elements: slice) -> Iterator[tuple[Group, slice]]:
        """Yield each group that overlaps `elements`, with the overlap, counted from the first of `elements`."""
        starts = [start for _, start in self.groups]
        for (group, start), end in zip(self.groups, [*starts[1:], elements.stop], strict=True):
            first, last = max(start, elements.start), min(end, elements.stop)
            if first < last:
                yield group, slice(first - elements.start, last - elements.start)


def lay_out(name: str, entries: list[Entry], alignment: int = ALIGNMENT) -> UnitLayout:
    """Place the entries of one unit one after the other: split ones, whole ones, partial ones; in each by group.

    Args:
        alignment: a multiple of `ALIGNMENT`, in elements.
    """
    found = list(dict.fromkeys(entry.group for entry in entries))
    places = {group: number for number, group in enumerate(sorted(found, key=lambda group: group.place))}
    starts: list[tuple[Group, int]] = []
    intervals, position = [], 0
    tp_replicated: int | None = None
    tp_partial: int | None = None
    # stable: entries of a group in a zone keep the model's order
    for entry in sorted(entries, key=lambda entry: (not entry.split, entry.partial, places[entry.group])):
        if not starts or starts[-1][0] != entry.group:
            starts.append((entry.group, position))
        if not entry.split and tp_replicated is None:
            tp_replicated = position
        if entry.partial and tp_partial is None:
            tp_partial = position
        stop = position + math.prod(entry.shape)
        intervals.append(Interval(entry.name, entry.shape, position, stop, entry.first, entry.matrix))
        position = aligned(stop, alignment=alignment)
    end = position if tp_replicated is None else tp_replicated
    return UnitLayout(name, tuple(intervals), tuple(starts), end, position, alignment, tp_partial)
