"""Declarations of parameters.

A parameter is declared on torch's meta device with a `Declaration`: its logical shape, how it is initialised, whether
it decays. Whoever gives it memory (`zero/`) reads the declaration; the model itself never allocates anything.

**The layer that owns a parameter delivers its gradient.** The engine hangs a `gradient_slot` on the parameter; the
layer's backward computes the gradient straight into that slot (a matrix product writes into the flat gradient
buffer with beta 0 or 1), so nothing is zeroed, no gradient tensor is allocated and no extra pass adds it up. Without
an engine the gradient goes back to autograd like any other, and `.grad` is filled as users of torch expect. Each use of
a parameter in forward is announced (`Tape.use`), so that the engine knows when the last gradient of a block has
arrived.

Layout rule: the sharded dimension comes first, so that the part of any rank is one interval of the flat parameter.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megazero.comm.grid import Axis
from megazero.kernels import counter

INITIAL_STD = 0.02  # of every weight matrix and embedding, as in GPT-2


@dataclass(frozen=True)
class Declaration:
    """The declaration of a parameter with normal or constant initial values: all that does not need its memory.

    Attributes:
        shape: the logical shape, over all ranks and without padding.
        std: standard deviation of its initial normal values; 0 for a constant.
        mean: the constant added to them.
        decay: whether weight decay applies (matmul weights and the token embedding); only a parameter that is split
            may decay, as the engine lays these out first.
        split: whether rows are split over the tensor axis; otherwise every rank of it holds them all.
        partial: each rank of the tensor axis uses it on a part of the heads, and so has a part of its gradient.
        first_row: the logical row at which this rank's part begins.
        local_shape: this rank's part, padding rows included.
    """

    shape: tuple[int, ...]
    std: float
    mean: float
    decay: bool
    split: bool
    first_row: int
    local_shape: tuple[int, ...]
    partial: bool = False

    @property
    def row(self) -> int:
        """Number of elements in one row."""
        return torch.Size(self.shape[1:]).numel()

    def initial(self, seed: int, name: str, start: int, stop: int) -> Tensor:
        """Return the initial values of elements [start, stop) of this rank's flattened part: fp64, padding 0.

        They depend on the seed, the parameter's full name and the logical index alone, so every layout of ranks starts
        from the same model.
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
) -> nn.Parameter:
    """Return a parameter without memory, with its declaration.

    Args:
        axis: that the rows are split over, padded to a multiple of its size; None: all ranks hold all rows.
        partial: as of `Declaration`.
    """
    rows = axis.shard(shape[0]) if axis else shape[0]
    local_shape = (rows, *shape[1:])
    parameter = nn.Parameter(torch.empty(local_shape, device="meta"))
    first_row = rows * axis.rank if axis else 0
    declaration = Declaration(shape, std, mean, decay, axis is not None, first_row, local_shape, partial)
    parameter.declaration = declaration  # type: ignore[attr-defined]
    return parameter


def residual_std(layers: int) -> float:
    """Return the initial std of a block's last projections: smaller by 1 / sqrt(additions to the residual stream).

    As in GPT-2 (section 2.3); a block adds twice.
    """
    return INITIAL_STD / (2 * layers) ** 0.5


def declaration_of(parameter: nn.Parameter) -> Declaration:
    """Return what was declared of a parameter."""
    return parameter.declaration  # type: ignore[attr-defined]


def declarations_by_name(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Declaration]:
    """Return the declarations of some parameters, of a unit or of a whole model, by their full names."""
    return {name: declaration_of(parameter) for name, parameter in named}


def whole_shapes(model: nn.Module) -> dict[str, list[int]]:
    """Return the shape of every parameter over all ranks, as a checkpoint's manifest has it."""
    return {name: list(declaration_of(parameter).shape) for name, parameter in model.named_parameters()}
