"""Define the interface of optimizers that the engine and checkpoints use.

`mixture.py` implements it with megazero's optimizers, `library/elementwise.py` with any elementwise optimizer of torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megazero.zero.unit import Unit


@dataclass(frozen=True, eq=False)
class Run:
    """Consecutive elements of a unit's shard for which an optimizer keeps the same kinds of values.

    Attributes:
        where: their slice of the shard.
        optimizer: its name.
        state: the values by kind, one for each element; empty tensors of their length stand for values on disks.
    """

    where: slice
    optimizer: str
    state: Mapping[str, Tensor]


class Counted(Protocol):
    """Consecutive elements of a unit's shard that are updated at once."""

    @property
    def step(self) -> Tensor:
        """Return the number of updates, fp32, 0-dim."""
        ...


class Optimizer(Protocol):
    """An optimizer over the flat shards of units."""

    @property
    def kinds(self) -> Sequence[str]:
        """Return the kinds of values that it keeps for some elements of the model."""
        ...

    def runs(self, unit: Unit) -> Sequence[Run]:
        """Return the state of this rank's elements of a unit, in their order."""
        ...

    def pieces(self, unit: Unit) -> Sequence[Counted]:
        """Return the pieces in which a unit is updated, in their order."""
        ...

    def update(self, unit: Unit, *, lr: float, scale: Tensor, skip: Tensor) -> None:
        """Update a unit's masters with gradients times `scale`; write them, in forward's dtype, to `resting.updated`.

        All units are updated in the order in which they were given, on every rank.

        Args:
            scale: any float dtype: 0-dim, or one value for each norm by which groups are clipped.
            skip: 0-dim fp32; when 1 nothing changes.
        """
        ...
