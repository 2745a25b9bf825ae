"""The share of a model that one rank has: its units, what stage 3 gathers of them, and the elements that it updates."""

from dataclasses import dataclass, replace
from functools import cached_property

from megazero.plan.job import Job
from megazero.plan.states import UnitSize


@dataclass(frozen=True)
class Share:
    """The share of the model that a pipeline rank has.

    Attributes:
        blocks: their number.
        embedding, head: whether it has that end.
        sends, returns: neighbour stages on other ranks that get activations, and gradients.
    """

    blocks: int
    embedding: bool
    head: bool
    sends: int
    returns: int


@dataclass(frozen=True)
class Unit:
    """A unit of a rank, or the units of all its blocks, which are of one size.

    Attributes:
        padded: elements of its flat buffer.
        tail: the element from which on the buffer is whole on every tensor rank.
        count: number of such units.
        forward, backward: how often stage 3 gathers it in those of a micro-batch.
    """

    name: str
    padded: int
    tail: int
    count: int
    forward: int = 1
    backward: int = 0

    @property
    def times(self) -> int:
        return self.forward + self.backward


def share_of(job: Job, rank: int) -> Share:
    """Return the share of one rank of the pipeline axis."""
    layers, last = job.layers, job.shape.layers + 1
    stages = layers.of_rank(rank)
    own = [i for parts in stages.values() for i in parts]
    remote = [stage for stage in stages if stage + 1 < len(layers.parts) and layers.rank_of[stage + 1] != rank]
    back = [stage for stage in stages if stage > 0 and layers.rank_of[stage - 1] != rank]
    return Share(sum(0 < i < last for i in own), 0 in own, last in own, len(remote), len(back))


@dataclass(frozen=True)
class RankUnits:
    """The units of a rank with that share, and sums over them."""

    job: Job
    share: Share

    @cached_property
    def units(self) -> list[Unit]:
        """Return the units: embedding, head and tied weight, then the blocks."""
        job, share, last = self.job, self.share, self.job.shape.layers + 1
        parts = [range(1)] * share.embedding + [range(last, last + 1)] * share.head
        found = [self._unit(unit, unit.name, 1) for unit in job.units(parts)] if parts else []
        found = [replace(u, forward=share.embedding + share.head) if u.name == "tied" else u for u in found]
        if share.blocks:
            (block,) = job.units([range(1, 2)])
            found.append(replace(self._unit(block, "blocks", share.blocks), backward=1))
        return found

    def _unit(self, unit: UnitSize, name: str, count: int) -> Unit:
        return Unit(name, unit.padded(self.job.shard), unit.tail, count)

    @property
    def tied(self) -> list[Unit]:
        """Return the tied unit where another rank has it too, else nothing."""
        both = self.share.embedding and self.share.head
        return [unit for unit in self.units if unit.name == "tied" and self.job.pipeline > 1 and not both]

    @property
    def count(self) -> int:
        """Return the number of units."""
        return sum(unit.count for unit in self.units)

    @property
    def gathers(self) -> tuple[int, int]:
        """Return the elements that stage 3 gathers for the forward, and for the backward, of one micro-batch."""
        forward = sum(unit.padded * unit.count * unit.forward for unit in self.units)
        return forward, sum(unit.padded * unit.count * unit.backward for unit in self.units)

    def own(self, unit: Unit) -> int:
        """Return the elements of a unit that a rank updates, padding included."""
        return unit.padded // self.job.shard if self.job.shards_optimizer else unit.padded

    @property
    def updated(self) -> int:
        """Return the elements that the rank updates, padding included."""
        return sum(self.own(unit) * unit.count for unit in self.units)
