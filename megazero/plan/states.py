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
from itertools import groupby, pairwise

from megazero.plan.job import Bytes, Job
from megazero.plan.layers import Layer, Weight, block, head
from megazero.plan.model import Shape
from megazero.plan.optimizers import Optimizers, order
from megazero.plan.placements import ALIGNMENT, STAGES, Placement, aligned

_ZONES = ("split", "whole", "partial")  # of a flat buffer, in their order


@dataclass(frozen=True)
class UnitSize:
    """The size of one unit on a tensor rank.

    Attributes:
        name: the unit's name.
        weights: its parameters, in the model's order; those outside of blocks have their full names.
        tensor: number of tensor ranks.
        alignment: every parameter begins at a multiple of this many elements.
    """

    name: str
    weights: tuple[Weight, ...]
    tensor: int = 1
    alignment: int = ALIGNMENT

    @cached_property
    def tail(self) -> int:
        """Return the first element of the flat buffer's part that is whole on every tensor rank."""
        return self._length("split")

    @cached_property
    def end(self) -> int:
        """Return the length of the flat buffer in elements, before it is padded to a multiple of the shards."""
        return sum(map(self._length, _ZONES))

    def summed_from(self, *, sequence: bool) -> int | None:
        """Return the first element whose gradient is summed over the tensor axis; None: no gradient is."""
        if sequence:
            return self.tail
        partial = self._length("partial")
        return self.end - partial if partial else None

    def _length(self, zone: str) -> int:
        return sum(aligned(self._numel(own), alignment=self.alignment) for own in self.weights if own.zone == zone)

    def _numel(self, weight: Weight) -> int:
        return -(-weight.rows // self.tensor) * weight.columns if weight.zone == "split" else weight.numel

    def padded(self, shard: int) -> int:
        """Return the length in elements of the flat buffer that is padded for `shard` ranks."""
        return aligned(self.end, shard, self.alignment)

    def full_name(self, weight: Weight) -> str:
        """Return the full name of one of its parameters."""
        return f"{self.name}.{weight.name}" if self.name.startswith("blocks.") else weight.name

    def placed(self, optimizers: Optimizers) -> list[tuple[Weight, str, int, int]]:
        """Return each parameter with its optimizer and its elements [start, stop) of the flat buffer, in their order.

        They are placed as `zero/layout.py` does: by zone, then by optimizer and group.
        """
        chosen = [(own, *optimizers.of(self.full_name(own), hidden=own.matrix is not None)) for own in self.weights]
        found, at = [], 0
        for weight, optimizer, _ in sorted(chosen, key=lambda own: (_ZONES.index(own[0].zone), *order(*own[1:]))):
            found.append((weight, optimizer, at, at + self._numel(weight)))
            at = aligned(found[-1][3], alignment=self.alignment)
        return found


@cache  # a search asks for equal parts thousands of times
def units(
    shape: Shape, tensor: int, parts: tuple[range, ...] | None = None, alignment: int = ALIGNMENT
) -> Sequence[UnitSize]:
    """Return the units of some parts of the model's path (0 the embedding, the last the head), in forward order.

    Args:
        parts: ranges of parts; None: all parts.
    """
    own = {i for path in parts or [range(shape.layers + 2)] for i in path}
    tokens = Weight("embedding.tokens.weight", shape.vocab, shape.hidden)
    found = []
    if shape.tie_embeddings and own & {0, shape.layers + 1}:
        found.append(("tied", (tokens,)))
    if 0 in own:
        positions = Weight("embedding.positions.weight", shape.seq_len, shape.hidden, "whole")
        found.append(("embedding", (tokens,) * (not shape.tie_embeddings) + (positions,) * shape.learned_positions))
    blocks = (i - 1 for i in sorted(own) if 1 <= i <= shape.layers)
    found += ((f"blocks.{i}", _weights(block(shape, shape.kind(i)))) for i in blocks)
    if shape.layers + 1 in own:
        found.append(("head", _weights(head(shape))))
    return tuple(UnitSize(name, weights, tensor, alignment) for name, weights in found if weights)


def units_of(job: Job, parts: Sequence[range] | None = None) -> Sequence[UnitSize]:
    """Return the units of some parts of a job's model, on a tensor rank; see `units`."""
    return units(job.shape, job.tensor, None if parts is None else tuple(parts), job.alignment)


@cache
def kept(unit: UnitSize, optimizers: Optimizers, bytes_: Bytes, elements: range) -> int:
    """Return the bytes of optimizer state of some elements of a unit's flat buffer, besides the masters."""
    placed = groupby(unit.placed(optimizers), key=lambda own: own[1])
    runs = [(optimizer, next(own)[2]) for optimizer, own in placed]  # (optimizer, first element)
    return sum(
        bytes_.kept(optimizers.states(optimizer)) * max(0, min(end, elements.stop) - max(start, elements.start))
        for (optimizer, start), (_, end) in pairwise([*runs, ("", elements.stop)])
    )


def saved(shape: Shape, optimizers: Optimizers, bytes_: Bytes) -> int:
    """Return the bytes of the weights and the optimizer state of a whole model, as a checkpoint holds them."""
    placed = (each for unit in units(shape, 1) for each in unit.placed(optimizers))
    each = ((weight, bytes_.kept(optimizers.states(optimizer))) for weight, optimizer, _, _ in placed)
    return sum(weight.numel * (bytes_.master + of_state) for weight, of_state in each)


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


_ORDER = ("attention.qkv.weight", "attention.out.weight", "mlp.gate.weight", "mlp.up.weight", "mlp.down.weight")


def _weights(layers: Sequence[Layer]) -> tuple[Weight, ...]:
    """Return the parameters of some layers, matrices in the model's order."""
    found = [weight for layer in layers for weight in layer.weights]
    return tuple(sorted(found, key=lambda weight: _ORDER.index(weight.name) if weight.name in _ORDER else len(_ORDER)))
