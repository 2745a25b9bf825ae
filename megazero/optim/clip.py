"""Compute the global gradient norm and the clip factor.

The norm counts each logical parameter once. Squares are summed in fp64 for each unit and each shard of it, and these
sums are added in rank order, then in unit order, whether a rank holds one shard or all of them: fp32 sums over 1, 2 or
4 shards of a million elements differ by 1.7e-5, enough to break equality between stages through the clip. Units on
other ranks of the pipeline have their place in the same order. Replicas of a shard take the sums of the first one, and
a unit of both ends of the pipeline counts on the first stage. A sum of another copy is added only if it is not finite:
then the norm is not finite on any rank. Where each rank sums all of a whole copy (stage 0), the engine adds them so.

Clipping itself costs no pass: the factor goes into the update, which divides by the loss scale anyway.
"""

import torch
from torch import Tensor

from megazero.comm.collectives import all_reduce
from megazero.comm.grid import Axis
from megazero.comm.pinned import fetched
from megazero.kernels.operations import Operations
from megazero.zero.placement import Placement
from megazero.zero.unit import Unit

_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_: keeps the factor finite for a zero gradient


def unit_squares(units: list[Unit], places: Tensor, counted: Tensor, pipeline: Axis, ops: Operations) -> Tensor:
    """Return the sum of squared reduced gradients of each unit of the model: fp64, of the shape of `counted`.

    It is alike on all ranks whose reduced gradients are.

    Args:
        units: those of this rank.
        places: int64, the place of each among all units of the model; on the device, so that the host need not wait.
        counted: bool [units of the model], False for those of which another rank of the pipeline counts a copy.
        pipeline: the axis whose ranks have the other units.
    """
    found = []
    alike = [(unit.gradients.reduced.dtype, unit.axes.shard, unit.axes.replica, unit.axes.tensor) for unit in units]
    for group in dict.fromkeys(alike):
        members = [i for i, own in enumerate(alike) if own == group]
        squares = _group_squares([units[i] for i in members], *group[1:], ops)
        found.append((places if len(members) == len(units) else places[members], squares))
    everywhere = torch.zeros(counted.shape, dtype=torch.float64, device=places.device)
    for at, squares in found:
        everywhere.index_copy_(0, at, squares)
    return all_reduce(only_odd(everywhere, ~counted), pipeline, "norm")


def only_odd(sums: Tensor, where: Tensor | bool = True) -> Tensor:
    """Put 0 in the place of finite sums, where told; return the sums."""
    return sums.masked_fill_(torch.isfinite(sums) & where, 0.0)


def _group_squares(units: list[Unit], shard: Axis, replica: Axis, tensor: Axis, ops: Operations) -> Tensor:
    """Return the sum of squares of each of some units that have the same axes: fp64 [units]."""
    sharded = shard.size > 1 and units[0].axes.stage.optimizer is Placement.SHARD
    parts, counts = 1 if sharded else shard.size, tensor.rank == 0
    lengths = {unit: _lengths(unit, parts, counts=counts) for unit in units}
    if units[0].gradients.reduced.is_meta:  # one after the other in memory
        found = []
        for unit in units:
            with unit.gradients.reduced_in_memory() as gradients:
                found.append(ops.sums_of_squares(gradients.split(lengths[unit])))
        squares = torch.cat(found)
    else:
        squares = ops.sums_of_squares([cut for unit in units for cut in unit.gradients.reduced.split(lengths[unit])])
    squares = squares.view(len(units), parts, -1)
    first, *others = (squares[..., 0] if counts else squares[..., 0] + 0.0 * squares[..., 1]).unbind(1)
    for other in others:
        first = first + other
    total = fetched(first, units[0].device)  # gradients may be on the host
    if sharded:
        total = all_reduce(total, shard, "norm")
    if replica.size > 1:  # one group's sums for all: in another order of sums their updates would part
        total = all_reduce(total if replica.rank == 0 else only_odd(total), replica, "norm")
    return all_reduce(total, tensor, "norm")


def _lengths(unit: Unit, parts: int, *, counts: bool) -> list[int]:
    """Return the lengths into which the gradients that this rank updates with are cut: equal parts, or two of each.

    Args:
        counts: parameters replicated over the tensor axis count on this rank: the first. On other ranks they are the
            second piece of each part, whose sum is added 0 times, so that a value that is not finite still shows.
    """
    length = len(unit.gradients.reduced) // parts
    if counts:
        return [length] * parts
    first = unit.layout.tp_replicated - unit.shard.start
    counted = [min(max(first - part * length, 0), length) for part in range(parts)]
    return [piece for own in counted for piece in (own, length - own)]


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """Return min(1, limit / norm), the factor of gradients of that norm; `limit` 0 means no clipping."""
    return (limit / (norm + _EPS)).clamp(max=1.0) if limit else torch.ones_like(norm)
