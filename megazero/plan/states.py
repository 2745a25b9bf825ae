"""Compute the model states of one rank: the exact bytes of parameters, gradients and optimizer state.

A unit (the embedding, a block, the head; a tied weight is its own unit) has P elements on a tensor rank. In its flat
buffer every parameter and each of N shards begins at a multiple of 16 elements (256 where transfers are quantised). p,
g and m are the bytes of a parameter, a gradient and a master (m = 4 with 16 bits). The optimizer has k = 3 m bytes an
element, or k = 2 m where p = m, because parameters are then their own masters:

    stage    parameters    gradients    optimizer          Rajbhandari et al. 2019 (arXiv 1910.02054), section 5:
    0        p P           g P          k P                16 P in mixed precision with g = 2, k = 12
    1        p P           g P          k P / N            4 P + 12 P / N
    2        p P           g P / N      k P / N            2 P + 14 P / N
    3        p P / N       g P / N      k P / N            16 P / N
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain

from megazero.plan.job import Bytes, Job
from megazero.plan.layers import Layer, block, head
from megazero.plan.model import Shape
from megazero.plan.placements import ALIGNMENT, STAGES, Placement, aligned


@dataclass(frozen=True)
class UnitSize:
    """The size of one unit on a tensor rank: the elements of each of its parameters.

    Attributes:
        split: elements of each parameter that is split over the tensor axis.
        whole: elements of each parameter that is whole on every tensor rank; they follow the split ones.
        partial: elements of each whole parameter whose gradient is a partial sum on each tensor rank; they come last.
        alignment: every parameter begins at a multiple of this many elements.
    """

    name: str
    split: tuple[int, ...]
    whole: tuple[int, ...] = ()
    alignment: int = ALIGNMENT
    partial: tuple[int, ...] = ()

    @cached_property
    def tail(self) -> int:
        """Return the first element of the flat buffer's part that is whole on every tensor rank."""
        return self._length(self.split)

    @cached_property
    def end(self) -> int:
        """Return the length of the flat buffer in elements, before it is padded to a multiple of the shards."""
        return self.tail + self._length(self.whole + self.partial)

    def summed_from(self, *, sequence: bool) -> int | None:
        """Return the first element whose gradient is summed over the tensor axis; None: no gradient is."""
        if sequence:
            return self.tail
        return self.end - self._length(self.partial) if self.partial else None

    def _length(self, parameters: Sequence[int]) -> int:
        return sum(aligned(numel, alignment=self.alignment) for numel in parameters)

    def padded(self, shard: int) -> int:
        """Return the length in elements of the flat buffer that is padded for `shard` ranks."""
        return aligned(self.end, shard, self.alignment)


@cache  # a search asks for equal parts thousands of times
def units(
    shape: Shape, tensor: int, parts: tuple[range, ...] | None = None, alignment: int = ALIGNMENT
) -> Sequence[UnitSize]:
    """Return the units of some parts of the model's path (0 the embedding, the last the head), in forward order.

    Args:
        parts: ranges of parts; None: all parts.
    """
    own = {i for path in parts or [range(shape.layers + 2)] for i in path}
    vocabulary = (-(-shape.vocab // tensor) * shape.hidden,)
    own_vocabulary = () if shape.tie_embeddings else vocabulary
    found = (
        [UnitSize("tied", vocabulary, (), alignment)] if shape.tie_embeddings and own & {0, shape.layers + 1} else []
    )
    if 0 in own:
        positions = (shape.seq_len * shape.hidden,) if shape.learned_positions else ()
        found.append(UnitSize("embedding", own_vocabulary, positions, alignment))
    blocks = (i - 1 for i in sorted(own) if 1 <= i <= shape.layers)
    found += (_unit(f"blocks.{i}", block(shape, shape.kind(i)), tensor, alignment) for i in blocks)
    if shape.layers + 1 in own:
        found.append(_unit("head", head(shape), tensor, alignment))
    return tuple(unit for unit in found if unit.split or unit.whole)


def units_of(job: Job, parts: Sequence[range] | None = None) -> Sequence[UnitSize]:
    """Return the units of some parts of a job's model, on a tensor rank; see `units`."""
    return units(job.shape, job.tensor, None if parts is None else tuple(parts), job.alignment)


def states(share: int, shard: int, stage: int, bytes_: Bytes) -> dict[str, int]:
    """Return the bytes that a rank holds between steps, by category, without offload.

    Args:
        share: padded elements of all units, divided by the number `shard` of ranks that share them.
    """
    rests, sharded = STAGES[stage], Placement.SHARD
    return {
        "parameters": bytes_.parameter * share * (1 if rests.parameters is sharded else shard),
        "gradients": bytes_.gradient * share * (1 if rests.gradients is sharded else shard),
        "optimizer": bytes_.optimizer * share * (1 if rests.optimizer is sharded else shard),
    }


def _unit(name: str, layers: Sequence[Layer], tensor: int, alignment: int) -> UnitSize:
    """Return the unit of some layers."""
    split = tuple(-(-rows // tensor) * columns for layer in layers for rows, columns in layer.split)
    whole, partial = (tuple(chain(*each)) for each in zip(*((one.whole, one.partial) for one in layers), strict=True))
    return UnitSize(name, split, whole, alignment, partial)
