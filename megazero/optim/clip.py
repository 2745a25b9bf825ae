"""The global gradient norm and the clip factor.

The norm counts each logical parameter once. Squares are summed in fp64 for each unit and each data rank's shard of it,
and these sums are added in rank order, then in unit order, whether a rank holds one shard or all of them: fp32 sums
over 1, 2 or 4 shards of a million elements differ by 1.7e-5, enough to break equality between stages through the clip.
Units on other ranks of the pipeline have their place in the same order.

Clipping itself costs no pass: the factor goes into the update, which divides by the loss scale anyway.
"""

import torch
from torch import Tensor

from megazero.comm.collectives import all_reduce
from megazero.kernels.operations import Operations
from megazero.zero.placement import ParallelAxes, Placement
from megazero.zero.unit import Unit

_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_: keeps the factor finite for a zero gradient


def unit_squares(units: list[Unit], places: Tensor, num_units: int, axes: ParallelAxes, ops: Operations) -> Tensor:
    """Sum of squared reduced gradients of each unit of the whole model: fp64 [num_units], the same on every rank.

    Args:
        units: that this rank counts.
        places: int64, of each its place among all units of the model; on the device, so that nobody waits for it.
        num_units: of the model.

    The tail of a unit is whole on every rank of the tensor axis; the first one counts it. On the others it counts
    nothing times, which is nothing unless it is not finite there.
    """
    sharded = axes.stage.optimizer is Placement.SHARD
    parts = 1 if sharded else axes.data.size
    squares = torch.stack(
        [_squares(units, part, parts, ops, with_tp_replicated=axes.tensor.rank == 0) for part in range(parts)]
    )
    total = squares[0]
    for shard in squares[1:]:
        total = total + shard
    total = total.to(places.device)  # gradients may be on the host
    if sharded:
        total = all_reduce(total, axes.data, "norm")
    everywhere = total.new_zeros(num_units)
    everywhere.index_copy_(0, places, all_reduce(total, axes.tensor, "norm"))
    return all_reduce(everywhere, axes.pipeline, "norm")


def _squares(units: list[Unit], part: int, parts: int, ops: Operations, *, with_tp_replicated: bool) -> Tensor:
    """fp64 [units]: of one of `parts` parts of what this rank updates of each, with or without what is tail there."""
    squares = []
    for unit in units:
        gradients = unit.reduced_gradients.chunk(parts)[part]
        if with_tp_replicated:
            squares.append(ops.sum_of_squares(gradients))
            continue
        border = max(unit.layout.tp_replicated - unit.shard.start - part * len(gradients), 0)
        squares.append(ops.sum_of_squares(gradients[:border]) + 0.0 * ops.sum_of_squares(gradients[border:]))
    return torch.stack(squares)


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """min(1, limit / norm): what gradients of that norm are multiplied by; `limit` 0 means no clipping."""
    return (limit / (norm + _EPS)).clamp(max=1.0) if limit else torch.ones_like(norm)
