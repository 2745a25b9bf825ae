"""Compute the global gradient norm and the clip factor.

The norm counts each logical parameter once. Squares are summed in fp64 for each shard of each unit; these sums are
added in rank order, then in unit order, whether a rank has one shard or all. fp64 is needed: fp32 sums over 1, 2 or 4
shards of a million elements differ by 1.7e-5, enough to make ZeRO stages differ through the clip factor. Units on other
pipeline ranks have fixed places in the same order. Replicas of a shard use the sums of the first replica, and a unit on
both ends of the pipeline counts on the first stage. Sums of the other copies are added only if they are not finite, so
that the norm is then non-finite on all ranks. At stage 0, where each rank has a whole copy, the engine does the same.

Clipping itself needs no pass: the factor is part of the update, which divides by the loss scale anyway.
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
    """Return the sums of squared reduced gradients of each unit of the model: fp64, in the shape of `counted`.

    A unit has one sum for each norm by which groups of parameters are clipped (`Group.clip`). The result is equal on
    all ranks with equal reduced gradients.

    Args:
        units: the units of this rank.
        places: int64, the index of each among all units of the model; on the device, so that the host need not wait.
        counted: bool [units of the model, norms], False for a unit that another pipeline rank counts.
        pipeline: the axis whose ranks have the other units.
        ops: the kernels to use.
    """
    found = []
    alike = [(unit.gradients.reduced.dtype, unit.axes.shard, unit.axes.replica, unit.axes.tensor) for unit in units]
    for group in dict.fromkeys(alike):
        members = [i for i, own in enumerate(alike) if own == group]
        squares = _group_squares([units[i] for i in members], *group[1:], ops, counted.shape[1])
        found.append((places if len(members) == len(units) else places[members], squares))
    everywhere = torch.zeros(counted.shape, dtype=torch.float64, device=places.device)
    for at, squares in found:
        everywhere.index_copy_(0, at, squares)
    return all_reduce(only_odd(everywhere, ~counted), pipeline, "norm")


def only_odd(sums: Tensor, where: Tensor | bool = True) -> Tensor:
    """Replace finite sums by 0 in place, where `where` is True; return the sums."""
    return sums.masked_fill_(torch.isfinite(sums) & where, 0.0)


def _group_squares(units: list[Unit], shard: Axis, replica: Axis, tensor: Axis, ops: Operations, norms: int) -> Tensor:
    """Return the sums of squares of each unit, for units with common axes: fp64 [units, norms]."""
    sharded = shard.size > 1 and units[0].axes.stage.optimizer is Placement.SHARD
    parts, counts = 1 if sharded else shard.size, tensor.rank == 0
    cuts = {unit: _cuts(unit, parts, norms, counts=counts) for unit in units}
    if units[0].gradients.reduced.is_meta:  # on disks: load one unit at a time
        found = []
        for unit in units:
            with unit.gradients.reduced_in_memory() as gradients:
                found.append(ops.sums_of_squares([gradients[cut] for cell in cuts[unit] for cut in cell]))
        squares = torch.cat(found)
    else:
        own = [unit.gradients.reduced[cut] for unit in units for cell in cuts[unit] for cut in cell]
        squares = ops.sums_of_squares(own)
    if norms > 1:
        squares = torch.stack([cell.sum() for cell in squares.split([len(c) for unit in units for c in cuts[unit]])])
    squares = squares.view(len(units), parts, norms, -1)
    first, *others = (squares[..., 0] if counts else squares[..., 0] + 0.0 * squares[..., 1]).unbind(1)
    for other in others:
        first = first + other
    total = fetched(first, units[0].device)  # gradients may be on the host
    if sharded:
        total = all_reduce(total, shard, "norm")
    if replica.size > 1:  # all replicas use the first one's sums: different rounding would make their updates differ
        total = all_reduce(total if replica.rank == 0 else only_odd(total), replica, "norm")
    return all_reduce(total, tensor, "norm")


def _cuts(unit: Unit, parts: int, norms: int, *, counts: bool) -> list[list[slice]]:
    """Return the intervals of reduced gradients whose squares are summed in each cell [part, norm, counted or not].

    Args:
        parts: number of equal parts, whose sums are added in rank order.
        norms: number of norms; with one, a cell is one interval.
        counts: True on the tensor axis' first rank, which counts parameters replicated over the axis. On other ranks
            there are cells of those too; their sums are added times 0, so that a non-finite value still shows.
    """
    length, first = len(unit.gradients.reduced) // parts, unit.shard.start
    cells = []
    for begin in range(0, parts * length, length):
        within = slice(first + begin, first + begin + length)
        whole = within.stop if counts else min(max(unit.layout.tp_replicated, within.start), within.stop)
        zones = [(within.start, whole)] if counts else [(within.start, whole), (whole, within.stop)]
        groups = [(0, slice(0, length))]
        if norms > 1:
            groups = [(group.clip, where) for group, where in unit.layout.group_slices(within)]
        for norm in range(norms):
            for zone in zones:
                low, high = (edge - within.start for edge in zone)
                own = [slice(max(w.start, low), min(w.stop, high)) for clip, w in groups if clip == norm]
                cut = [
                    slice(begin + w.start, begin + max(w.stop, w.start)) for w in own if norms == 1 or w.start < w.stop
                ]
                cells.append(cut)
    return cells


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """Return min(1, limit / norm), the factor for gradients with this norm; 1 if `limit` is 0."""
    return (limit / (norm + _EPS)).clamp(max=1.0) if limit else torch.ones_like(norm)
