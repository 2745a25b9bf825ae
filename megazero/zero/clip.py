"""The global gradient norm and the clip factor.

The norm counts each logical parameter once. Squares are summed in fp64 for each unit and the sums added in unit order:
fp32 sums over 1, 2 or 4 shards of a million elements differ by 1.7e-5, enough to break equality between stages through
the clip; fp64 partial sums agree after rounding.
"""

import torch
from torch import Tensor

from megazero.kernels.operations import Operations
from megazero.parallel.collectives import all_reduce
from megazero.parallel.grid import Axis
from megazero.zero.unit import Unit

_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_: keeps the factor finite for a zero gradient


def unit_squares(units: list[Unit], ops: Operations, tensor: Axis) -> Tensor:
    """Sum of squared gradients of each unit over the whole model: fp64 [units], the same on every rank.

    The tail of a unit is whole on every rank of the tensor axis; the first one counts it.
    """
    squares = [ops.sum_of_squares(u.gradients if tensor.rank == 0 else u.gradients[: u.layout.tail]) for u in units]
    return all_reduce(torch.stack(squares), tensor, "norm")


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """min(1, limit / norm): what gradients of that norm are multiplied by; `limit` 0 means no clipping."""
    return (limit / (norm + _EPS)).clamp(max=1.0) if limit else torch.ones_like(norm)
