"""The share of a model that one rank has: its units, the elements that stage 3 gathers, and those that it updates."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from megazero.plan.job import Job
from megazero.plan.model import Kind
from megazero.plan.states import kept, units_of


@dataclass(frozen=True)
class Unit:
    """A unit of a rank, or the units of all its blocks of a kind, which have one size.

    Attributes:
        padded: elements of its flat buffer.
        own: elements that the rank updates.
        tail: the first element whose gradient is summed over the tensor axis; None: no gradient is.
        count: number of such units.
        forward, backward: how often stage 3 gathers it in the forward, and in the backward, of a micro-batch.
    """

    name: str
    padded: int
    own: int
    tail: int | None
    count: int
    forward: int
    backward: int

    @property
    def times(self) -> int:
        """Return how often stage 3 gathers the unit in a micro-batch."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Share:
    """The share of a job's model that a pipeline rank has, and sums over its units.

    Attributes:
        kinds: number of blocks of each kind.
        embedding, head: whether the rank has the embedding, the head.
        sends, returns: number of stages on other ranks to which it sends activations, and gradients.
        rank: number of the rank on the pipeline axis.
    """

    job: Job
    kinds: Mapping[Kind, int]
    embedding: bool
    head: bool
    sends: int = 0
    returns: int = 0
    rank: int = 0

    @cached_property
    def units(self) -> list[Unit]:
        """Return the units: embedding, head and tied weight, then the blocks."""
        job, last = self.job, self.job.shape.layers + 1
        counts = {f"blocks.{job.shape.kinds.index(kind)}": count for kind, count in self.kinds.items()}
        parts = [range(1)] * self.embedding + [range(last, last + 1)] * self.head
        parts += [range(i + 1, i + 2) for i in map(job.shape.kinds.index, self.kinds)]
        found = []
        for unit in sorted(units_of(job, parts), key=lambda unit: unit.name in counts):
            padded, count = unit.padded(job.shard), counts.get(unit.name, 1)
            own = padded // job.shard if job.shards_optimizer else padded
            forward = self.embedding + self.head if unit.name == "tied" else 1
            tail = unit.summed_from(sequence=job.sequence)
            found.append(Unit(unit.name, padded, own, tail, count, forward, backward=int(unit.name in counts)))
        return found

    @property
    def blocks(self) -> int:
        """Return the number of blocks."""
        return sum(self.kinds.values())

    @property
    def tied(self) -> list[Unit]:
        """Return [the tied unit] if another pipeline rank has it too, else []."""
        both = self.embedding and self.head
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

    def kept(self, shard_rank: int) -> int:
        """Return the bytes of optimizer state that a shard rank keeps, besides the masters."""
        job = self.job
        counts = {job.bytes.kept(job.optimizers.states(name)) for name in job.optimizers.names}
        if len(counts) == 1:
            return counts.pop() * self.updated
        found, at = 0, shard_rank if job.shards_optimizer else 0
        for unit in units_of(job, [*job.layers.of_rank(self.rank).values()]):  # groups may tell equal blocks apart
            own = unit.padded(job.shard) // (job.shard if job.shards_optimizer else 1)
            found += kept(unit, job.optimizers, job.bytes, range(at * own, (at + 1) * own))
        return found

    @property
    def updated(self) -> int:
        """Return the elements that the rank updates, padding included."""
        return sum(unit.own * unit.count for unit in self.units)


def share_of(job: Job, rank: int) -> Share:
    """Return the share of one rank of the pipeline axis."""
    layers, stages = job.layers, job.layers.of_rank(rank)
    last = len(layers.parts) - 1
    return Share(
        job,
        sum((Counter(job.kinds(parts)) for parts in stages.values()), Counter()),
        0 in stages,
        last in stages,
        sends=sum(stage < last and layers.rank_of[stage + 1] != rank for stage in stages),
        returns=sum(stage > 0 and layers.rank_of[stage - 1] != rank for stage in stages),
        rank=rank,
    )
