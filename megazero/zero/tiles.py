"""Bring the tiles of a weight, each a unit of its own, when a layer asks for them; show them as one weight elsewhere.

No layer's hooks gather a tile (`hooks.py`): a layer has more of them than may be there at once. It asks for one after
the other, and the one after that is on its way meanwhile.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby

import torch
from torch import Tensor

from megazero.zero.gather import Gather
from megazero.zero.unit import Unit


class GatheredTile:
    """The way to a tile: its unit is gathered and freed whenever its layer asks for that."""

    def __init__(self, unit: Unit, gather: Gather):
        self._units, self._gather = [unit], gather

    def prefetch(self) -> None:
        """Start to gather the tile, because it will be used soon."""
        self._gather.prefetch(self._units)

    def acquire(self) -> None:
        """Wait until the tile is there."""
        self._gather.unshard(self._units)

    def release(self) -> None:
        """Free the tile until it is asked for again."""
        self._gather.reshard(self._units)


def with_whole_weights(
    units: Iterable[Unit], values: Callable[[Unit], Iterator[tuple[str, Tensor]]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, values) of every parameter that a rank has, a weight in tiles once.

    Args:
        units: in forward order, so that the tiles of a weight follow one another.
        values: yields those of one unit, each valid until the next one is asked for.
    """
    for name, same in groupby(units, key=lambda unit: unit.layout.intervals[0].name):
        first, *more = same
        if more:
            yield name, torch.cat([value.clone() for unit in (first, *more) for _, value in values(unit)])
        else:
            yield from values(first)
