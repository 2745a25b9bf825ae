"""Declare parameters.

A parameter is declared on torch's meta device with a `Declaration`: its logical shape, initial values and weight decay.
`zero/` reads the declaration and allocates the memory; the model itself allocates nothing.

**The layer that owns a parameter delivers its gradient.** The engine sets a `gradient_slot` on the parameter; the
layer's backward computes the gradient directly into that slot (a matrix product writes into the flat gradient buffer
with beta 0 or 1), so nothing is zeroed, no gradient tensor is allocated, and no extra pass accumulates it. Without an
engine the gradient is returned to autograd, which fills `.grad` as usual in torch. Each use of a parameter in forward
is announced (`Tape.use`), so that the engine knows when the last gradient of a unit has arrived.

Layout rule: the dimension split over the tensor axis comes first, so each rank's part is one interval of the flat
parameter.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megazero.comm.grid import Axis
from megazero.kernels import counter
from megazero.plan.matrices import Matrix


@dataclass(frozen=True)
class Declaration:
    """The properties of a parameter, with normal or constant initial values, that are known without its memory.

    Attributes:
        shape: the logical shape, over all ranks and without padding.
        std: standard deviation of its initial normal values; 0 for a constant.
        mean: the constant added to them.
        decay: True if weight decay applies (matmul weights and the token embedding).
        split: True if rows are split over the tensor axis, False if each of its ranks has all rows.
        partial: each rank of the tensor axis uses the parameter on its part of the heads, and so has a partial
            gradient.
        matrix: the matrices of a weight inside of a block, for optimizers of whole matrices; None: it is no such one.
        first_row: the logical row at which this rank's part begins.
        local_shape: the shape of this rank's part, padding rows included.
    """

    shape: tuple[int, ...]
    std: float
    mean: float
    decay: bool
    split: bool
    first_row: int
    local_shape: tuple[int, ...]
    partial: bool = False
    matrix: Matrix | None = None

    @property
    def row(self) -> int:
        """Return the number of elements in one row."""
        return torch.Size(self.shape[1:]).numel()

    def initial(self, seed: int, name: str, start: int, stop: int) -> Tensor:
        """Return the initial values of elements [start, stop) of this rank's flattened part: fp64, padding 0.

        They depend only on the seed, the parameter's full name and the logical index, so every layout of ranks starts
        with equal weights.
        """
        offset, logical = self.first_row * self.row, torch.Size(self.shape).numel()
        first, last = min(offset + start, logical), min(offset + stop, logical)
        values = torch.zeros(stop - start, dtype=torch.float64)
        if self.std:
            values[: last - first] = counter.normal(seed, name, first, last).mul_(self.std)
        values[: last - first] += self.mean
        return values


def declare(
    shape: tuple[int, ...],
    *,
    std: float = 0.0,
    mean: float = 0.0,
    decay: bool = False,
    axis: Axis | None = None,
    partial: bool = False,
    matrix: Matrix | None = None,
) -> nn.Parameter:
    """Return a parameter without memory, with its declaration.

    Args:
        axis: the axis that splits the rows, padded to a multiple of its size; None: each rank has all rows.
        partial, matrix: see `Declaration`.
    """
    rows = axis.shard(shape[0]) if axis else shape[0]
    local_shape = (rows, *shape[1:])
    parameter = nn.Parameter(torch.empty(local_shape, device="meta"))
    first_row = rows * axis.rank if axis else 0
    declaration = Declaration(shape, std, mean, decay, axis is not None, first_row, local_shape, partial, matrix)
    parameter.declaration = declaration  # type: ignore[attr-defined]
    return parameter


def declaration_of(parameter: nn.Parameter) -> Declaration:
    """Return the declaration of a parameter."""
    return parameter.declaration  # type: ignore[attr-defined]


def declarations_by_name(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Declaration]:
    """Return the declarations of parameters by full name."""
    return {name: declaration_of(parameter) for name, parameter in named}


def whole_shapes(model: nn.Module) -> dict[str, list[int]]:
    """Return the logical shape of every parameter by name, as in a checkpoint's manifest."""
    return {name: list(declaration_of(parameter).shape) for name, parameter in model.named_parameters()}
