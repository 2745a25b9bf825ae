"""Tell which part of a unit a rank saves, and which it loads."""

from collections.abc import Mapping

from torch import Tensor

from megazero.checkpoint.manifest import WEIGHT
from megazero.checkpoint.pieces import pieces_of
from megazero.checkpoint.save import ShardState
from megazero.plan.placements import aligned
from megazero.zero.unit import Unit


def holding_to_save(unit: Unit, state: Mapping[str, Tensor], numel: Mapping[str, int]) -> ShardState:
    """Return the share of a unit that only this rank saves, on the device or the host.

    Args:
        state: what the optimizer keeps of each element that this rank updates.
        numel: of each parameter the elements over all ranks, without padding.
    """
    return _holding(unit, state, numel, _share(unit), once=True)


def holding_to_load(unit: Unit, state: Mapping[str, Tensor], numel: Mapping[str, int]) -> ShardState:
    """Return what this rank updates of a unit: the tensors to load, from which the rest follows."""
    return _holding(unit, state, numel, unit.shard, once=False)


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


def _holding(
    unit: Unit, state: Mapping[str, Tensor], numel: Mapping[str, int], share: slice, *, once: bool
) -> ShardState:
    pieces = tuple(pieces_of(unit.layout, share, numel, unit.axes.tensor, once=once))
    within = slice(share.start - unit.shard.start, share.stop - unit.shard.start)
    tensors = {kind: flat[within] for kind, flat in {WEIGHT: unit.masters, **state}.items()}
    return ShardState(pieces, tensors, disks=unit.resting.paged if unit.masters.is_meta else None)
