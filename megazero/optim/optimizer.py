"""Define the interface of optimizers that the engine and checkpoints use.

An optimizer declares its state per updated element; checkpoints save and load the declared state. `adamw.py`
implements it with fused kernels, `library/elementwise.py` with any elementwise optimizer of torch.
"""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from megazero.zero.unit import Unit


class Optimizer(Protocol):
    """An optimizer over the flat shards of units."""

    @property
    def STATE(self) -> tuple[str, ...]:
        """Return the names of the values that it keeps for each element."""
        ...

    @property
    def state(self) -> Mapping[Unit, Mapping[str, Tensor]]:
        """Return the state of each unit by these names: flat tensors of the length of its masters."""
        ...

    def steps(self, unit: Unit) -> list[Tensor]:
        """Return the update counts of a unit's pieces, for a resumed run to set."""
        ...

    def update(self, unit: Unit, *, lr: float, scale: Tensor, skip: Tensor) -> None:
        """Update a unit's masters with gradients times `scale`; write them, in forward's dtype, to `resting.updated`.

        Args:
            scale: 0-dim, any float dtype.
            skip: 0-dim fp32; when 1 nothing changes.
        """
        ...
