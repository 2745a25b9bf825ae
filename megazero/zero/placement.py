"""What rests where: a ZeRO stage is a row of a table, a communication is a change of placement.

    | stage | parameters | gradients                 | optimizer state |
    |-------|------------|---------------------------|-----------------|
    | 0     | Replicate  | Partial -> all-reduce     | Replicate       |
    | 1     | Replicate  | Partial -> reduce-scatter | Shard           |
    | 2     | Replicate  | Shard                     | Shard           |
    | 3     | Shard      | Shard                     | Shard           |

Rajbhandari et al. 2019 (ZeRO), section 5: the ranks of the data axis hold replicas of the parameters, and each computes
the gradients of its own samples (Partial: the sum over the ranks is meant). Partial gradients gather over the
micro-batches of a step and change their placement once, at its end; sharded ones are reduced into the shard after each
micro-batch. Gradients go to where the optimizer state is; updated parameters come from there, and sharded ones are
gathered wherever they are used. A rank's shard is one of `size` equal intervals of a unit's flat buffer.
"""

from dataclasses import dataclass, field
from enum import Enum

import torch

from megazero.comm.grid import Axis


class Placement(Enum):
    """Where a flat buffer's meaning lies along the data axis."""

    REPLICATE = "every rank holds all of it"
    PARTIAL = "the sum over all ranks is meant"
    SHARD = "each rank holds its own interval"


@dataclass(frozen=True)
class ZeroStage:
    """Where parameters, gradients and optimizer state rest between their uses."""

    parameters: Placement
    gradients: Placement
    optimizer: Placement


STAGES = {
    0: ZeroStage(Placement.REPLICATE, Placement.PARTIAL, Placement.REPLICATE),
    1: ZeroStage(Placement.REPLICATE, Placement.PARTIAL, Placement.SHARD),
    2: ZeroStage(Placement.REPLICATE, Placement.SHARD, Placement.SHARD),
    3: ZeroStage(Placement.SHARD, Placement.SHARD, Placement.SHARD),
}


@dataclass(frozen=True)
class Precision:
    """The dtypes of a run.

    Attributes:
        parameters: of what forward and backward compute with, and of activations.
        gradients: in which they gather and are summed over ranks.
    """

    parameters: torch.dtype = torch.float32
    gradients: torch.dtype = torch.float32

    @property
    def masters(self) -> torch.dtype:
        """Of the parameters that the optimizer updates, and of its moments: fp32 beside 16-bit parameters."""
        return torch.float64 if self.parameters == torch.float64 else torch.float32


@dataclass(frozen=True, eq=False)
class ParallelAxes:
    """Over which ranks a step is spread.

    Attributes:
        data: ranks with other samples.
        tensor: ranks with other parts of the matrices.
        sequence: gradients of what is whole over the tensor axis are partial there.
        stage: what rests sharded over the data axis.
        pipeline: ranks with other stages of the model.
        ends: the first and the last of these, which may share a weight.
    """

    data: Axis
    tensor: Axis
    sequence: bool
    stage: ZeroStage = STAGES[0]
    pipeline: Axis = field(default_factory=lambda: Axis("pipeline"))
    embedding_group: Axis = field(default_factory=lambda: Axis("ends"))


def shard_slice(numel: int, placement: Placement, axis: Axis) -> slice:
    """The elements of a flat buffer of `numel` (a multiple of the axis' size) that a rank holds."""
    if placement is not Placement.SHARD:
        return slice(0, numel)
    part = numel // axis.size
    return slice(axis.rank * part, (axis.rank + 1) * part)
