"""The axes of the grid of ranks.

A layer, a unit or a loader receives the axes it uses, never the whole grid. An axis of size 1 is the identity: the
same code runs, and every region, reduction and slice along it leaves what it gets as it is.

Words: an *axis* is a direction of the grid (tensor, pipeline, data), a *dim* one of a tensor.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """One direction of the grid as one rank sees it.

    Attributes:
        name: "tensor", "pipeline" or "data".
        size: how many ranks lie along it.
        rank: this rank's place, 0 <= rank < size.
    """

    name: str
    size: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, f"{self.name}: rank {self.rank} outside an axis of {self.size}"

    def shard(self, total: int) -> int:
        """How many of `total` rows one rank holds; the last ranks' rows may be padding (`total` rounded up)."""
        return -(-total // self.size)
