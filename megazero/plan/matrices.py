"""Decide which rank updates which matrix, for optimizers that need whole matrices (Muon).

The ranks of a shard axis hold intervals of a parameter's gradient, those of a tensor axis some of its rows. One of
them, the *owner*, gathers all of it, computes, and sends each rank its part of the result: first along the shard axis,
to the owner's shard rank; then along the tensor axis. A *wave* is the parameters of as many neighbouring units as give
each rank about one of them; they are exchanged at once. In a wave the costliest parameter goes first, to the rank with
the least work so far, and of several to the one that holds most of it. So owners are a function of the layout alone.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


@dataclass(frozen=True)
class Matrix:
    """A parameter as its optimizer sees it: one matrix, or several whose rows take turns in it.

    Attributes:
        rows, columns: of the parameter as it is stored.
        parts: the rows of each matrix among every `period` rows, as (first, one past the last); (): one matrix.
        inputs_first: rows are the inputs of its product, columns the outputs.
    """

    rows: int
    columns: int
    parts: tuple[tuple[int, int], ...] = ()
    period: int = 0
    inputs_first: bool = False

    @property
    def turns(self) -> tuple[int, Sequence[tuple[int, int]]]:
        """Return (period, parts), also of a parameter that is one matrix."""
        return (self.period, self.parts) if self.parts else (self.rows, [(0, self.rows)])

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Return the rows and columns of each matrix, as stored."""
        period, parts = self.turns
        return [(self.rows // period * (stop - start), self.columns) for start, stop in parts]

    @property
    def cost(self) -> int:
        """Return a number proportional to the work of an update: m^2 n of each matrix, m the shorter side."""
        return sum(rows * columns * min(rows, columns) for rows, columns in self.shapes)


class Item(NamedTuple):
    """A parameter with whole matrices, in the flat buffer of its unit on one tensor rank.

    Attributes:
        unit: number of the unit among those of a rank.
        start, stop: its elements in the buffer.
        each: elements of the buffer on each shard rank; None: every one holds all.
    """

    unit: int
    start: int
    stop: int
    each: int | None
    matrix: Matrix

    def held(self, shard: int) -> slice:
        """Return the elements of the item that are on a shard rank."""
        if self.each is None:
            return slice(self.start, self.stop)
        first = min(max(self.start, shard * self.each), self.stop)
        return slice(first, max(first, min(self.stop, (shard + 1) * self.each)))

    @property
    def numel(self) -> int:
        """Return its elements on one tensor rank."""
        return self.stop - self.start


@dataclass(frozen=True)
class Exchange:
    """The parts of some items that the ranks of one axis hold, and the rank that owns each item.

    Attributes:
        held: [rank][item] -> elements; items are in the order of their owners.
        owners: [item] -> rank.
    """

    held: tuple[tuple[int, ...], ...]
    owners: tuple[int, ...]

    @cached_property
    def counts(self) -> list[list[int]]:
        """Return the elements that each rank has for each: [from][to]."""
        found = [[0] * len(self.held) for _ in self.held]
        for row, own in zip(found, self.held, strict=True):
            for owner, numel in zip(self.owners, own, strict=True):
                row[owner] += numel
        return found

    @cached_property
    def back(self) -> list[list[int]]:
        """Return the elements that each rank sends back to each."""
        return [list(column) for column in zip(*self.counts, strict=True)]

    def places(self, rank: int) -> dict[int, list[slice]]:
        """Return the places of the items of a rank in what it receives, one from each rank: from rank 0 all come first.

        Parts without elements are left out.
        """
        found: dict[int, list[slice]] = {item: [] for item, owner in enumerate(self.owners) if owner == rank}
        at = 0
        for own in self.held:
            for item, parts in found.items():
                parts += [slice(at, at + own[item])] if own[item] else []
                at += own[item]
        return found

    def sent(self, rank: int) -> int:
        """Return the elements that a rank sends, to the owners of others' items and back to the holders of its own."""
        return sum(self.counts[rank]) + sum(self.back[rank]) - 2 * self.counts[rank][rank]


@dataclass(frozen=True)
class Wave:
    """Items that are exchanged at once, in the order of their owners.

    Attributes:
        owners: [item] -> shard rank x tensor ranks + tensor rank.
        shards, tensors: ranks of the two axes.
        sharded: shard ranks hold different elements; if not, all of them hold all.
    """

    items: tuple[Item, ...]
    owners: tuple[int, ...]
    shards: int
    tensors: int
    sharded: bool

    @cached_property
    def over_shards(self) -> Exchange:
        """Return the exchange along the shard axis."""
        spans = [[item.held(rank) for item in self.items] for rank in range(self.shards)]
        held = tuple(tuple(span.stop - span.start for span in of_rank) for of_rank in spans)
        return Exchange(held, tuple(owner // self.tensors for owner in self.owners))

    def of_shard(self, shard: int) -> list[Item]:
        """Return the items that the tensor ranks of a shard rank own."""
        return [item for item, owner in zip(self.items, self.owners, strict=True) if owner // self.tensors == shard]

    def owned(self, shard: int, tensor: int) -> list[Item]:
        """Return the items that a rank owns."""
        place = shard * self.tensors + tensor
        return [item for item, owner in zip(self.items, self.owners, strict=True) if owner == place]

    def over_tensor(self, shard: int) -> Exchange:
        """Return the exchange of these items along the tensor axis, whose ranks have different rows of each."""
        held = tuple(item.numel for item in self.of_shard(shard))
        own = tuple(owner % self.tensors for owner in self.owners if owner // self.tensors == shard)
        return Exchange((held,) * self.tensors, own)

    @cached_property
    def longest(self) -> int:
        """Return the largest number of elements of the items of one shard rank."""
        return max(sum(item.numel for item in self.of_shard(rank)) for rank in range(self.shards))

    def buffers(self, shard: int, tensor: int) -> "Buffers":
        """Return the elements that a rank needs at once for this wave."""
        own = sum(item.numel for item in self.of_shard(shard))
        parts = sum(item.held(shard).stop - item.held(shard).start for item in self.items)
        if not self.sharded:
            parts = self.shards * self.longest
        whole = sum(self.over_tensor(shard).back[tensor]) if self.tensors > 1 else 0
        return Buffers(parts, own * self.sharded, own * (self.sharded and self.tensors > 1), whole)


def room(waves: Sequence[Wave], shard: int, tensor: int) -> tuple[list["Buffers"], int, list[tuple[int, int]]]:
    """Return the memory that a rank allocates for all waves.

    The buffers of two waves, or of the only one; the elements of the longest parameter that the rank owns; and the
    shapes of its matrices, for `workspace`.
    """
    most = Buffers(*map(max, zip(*(wave.buffers(shard, tensor) for wave in waves), strict=True)))
    own = [item.matrix for wave in waves for item in wave.owned(shard, tensor)]
    longest = max((matrix.rows * matrix.columns for matrix in own), default=0)
    return [most] * min(2, len(waves)), longest, [shape for matrix in own for shape in matrix.shapes]


def workspace(shapes: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Return the elements of the largest matrix of these shapes, and of the largest product with its transpose."""
    sides = [(min(shape), max(shape)) for shape in shapes]
    return max((m * n for m, n in sides), default=0), max((m * m for m, _ in sides), default=0)


class Buffers(NamedTuple):
    """The elements that a rank exchanges in a wave.

    Attributes:
        parts: its own parts of items; where every shard rank holds all, room for all results.
        gathered: parts of the items of its shard rank, from the other shard ranks.
        joined: these, item by item, where they are sent on along the tensor axis.
        whole: parts of its own items, from the other tensor ranks.
    """

    parts: int
    gathered: int
    joined: int
    whole: int


def waves_of(units: Sequence[Sequence[Item]], shards: int, tensors: int, *, sharded: bool) -> Iterator[Wave]:
    """Yield the waves of the items of a rank's units, in the order in which units are updated."""
    done, waiting = [0] * (shards * tensors), list[Item]()
    for number, items in enumerate(units):
        waiting += items
        if waiting and (len(waiting) >= len(done) or number + 1 == len(units)):
            owned = sorted(_owned(waiting, done, tensors), key=lambda pair: pair[1])
            items_, owners = (tuple(each) for each in zip(*owned, strict=True))
            yield Wave(items_, owners, shards, tensors, sharded and shards > 1)
            waiting = []


def _owned(items: Sequence[Item], done: list[int], tensors: int) -> list[tuple[Item, int]]:
    """Return the items with their owners; add their costs to `done`, the work of each rank in all waves."""
    work, owners = [0] * len(done), [0] * len(items)
    for number in sorted(range(len(items)), key=lambda number: -items[number].matrix.cost):
        item = items[number]

        def rank(place: int, item: Item = item) -> tuple[int, int, int, int]:
            span = item.held(place // tensors)
            return work[place], span.start - span.stop, done[place], place

        owner = owners[number] = min(range(len(done)), key=rank)
        work[owner] += item.matrix.cost
        done[owner] += item.matrix.cost
    return list(zip(items, owners, strict=True))
