"""Define where model states rest: a ZeRO stage is a row of one table for the engine (`zero/`) and these formulas.

Along the axis over which a unit is sharded:

    | stage | parameters | gradients                 | optimizer state |
    |-------|------------|---------------------------|-----------------|
    | 0     | Replicate  | Partial -> all-reduce     | Replicate       |
    | 1     | Replicate  | Partial -> reduce-scatter | Shard           |
    | 2     | Replicate  | Shard                     | Shard           |
    | 3     | Shard      | Shard                     | Shard           |

Rajbhandari et al. 2019 (ZeRO), section 5.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Literal

# Every parameter begins at a multiple of this many elements, and every shard's length is a multiple too. Vectorised
# kernels process the last few elements of a tensor one by one, and may round them differently. With this alignment they
# process an element in the same way wherever the buffer is cut, so AdamW gives the same bits in every stage.
ALIGNMENT = 16


class Placement(Enum):
    """The part of a flat buffer that each rank of an axis holds."""

    REPLICATE = "every rank holds all of it"
    PARTIAL = "every rank holds a partial sum; the value is the sum over all ranks"
    SHARD = "each rank holds its own interval"


@dataclass(frozen=True)
class ZeroStage:
    """The placements of parameters, gradients and optimizer state between their uses, along one axis."""

    parameters: Placement
    gradients: Placement
    optimizer: Placement


STAGES = {
    0: ZeroStage(Placement.REPLICATE, Placement.PARTIAL, Placement.REPLICATE),
    1: ZeroStage(Placement.REPLICATE, Placement.PARTIAL, Placement.SHARD),
    2: ZeroStage(Placement.REPLICATE, Placement.SHARD, Placement.SHARD),
    3: ZeroStage(Placement.SHARD, Placement.SHARD, Placement.SHARD),
}


def stages_that_shard(what: Literal["parameters", "gradients", "optimizer"]) -> list[int]:
    """Return the numbers of the ZeRO stages that shard `what`, the lowest first."""
    return [number for number, stage in STAGES.items() if getattr(stage, what) is Placement.SHARD]


def aligned(numel: int, parts: int = 1, alignment: int = ALIGNMENT) -> int:
    """Return `numel` rounded up so that each of `parts` equal parts is a multiple of the alignment."""
    unit = alignment * parts
    return -(-numel // unit) * unit
