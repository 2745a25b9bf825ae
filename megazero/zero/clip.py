"""The global gradient norm and the clip factor.

The norm counts each logical parameter once. Squares are summed in fp64 for each unit and each data rank's shard of it,
and these sums are added in rank order, then in unit order, whether a rank holds one shard or all of them: fp32 sums
over 1, 2 or 4 shards of a million elements differ by 1.7e-5, enough to break equality between stages through the clip.
"""

import torch
from torch import Tensor

from megazero.kernels.operations import Operations
from megazero.parallel.collectives import all_reduce
from megazero.parallel.grid import Axis
from megazero.zero.placement import Placement
from megazero.zero.unit import Unit

_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_: keeps the factor finite for a zero gradient


def unit_squares(units: list[Unit], placement: Placement, ops: Operations, *, data: Axis, tensor: Axis) -> Tensor:
    """Sum of squared gradients of each unit over the whole model: fp64 [units], the same on every rank.

    The tail of a unit is whole on every rank of the tensor axis; the first one counts it.

    Args:
        placement: of the reduced gradients along the data axis.
    """
    shards = [data.rank] if placement is Placement.SHARD else range(data.size)
    squares = torch.stack([_shard_squares(units, shard, ops, data.size, tensor.rank == 0) for shard in shards])
    total = squares[0]
    for shard in squares[1:]:
        total = total + shard
    if placement is Placement.SHARD:
        total = all_reduce(total, data, "norm")
    return all_reduce(total, tensor, "norm")


def _shard_squares(units: list[Unit], shard: int, ops: Operations, shards: int, with_tail: bool) -> Tensor:
    """fp64 [units]: of one shard of each, with or without what of the tail lies in it."""
    squares = []
    for unit in units:
        part = len(unit.gradients) // shards
        stop = (shard + 1) * part if with_tail else min((shard + 1) * part, unit.layout.tail)
        squares.append(ops.sum_of_squares(unit.gradients[shard * part : max(stop, shard * part)]))
    return torch.stack(squares)


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """min(1, limit / norm): what gradients of that norm are multiplied by; `limit` 0 means no clipping."""
    return (limit / (norm + _EPS)).clamp(max=1.0) if limit else torch.ones_like(norm)
