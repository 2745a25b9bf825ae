"""Find the tiles among a model's units, and give each the way to its memory."""

from collections.abc import Iterable, Sequence

from torch import nn

from megazero.model.contract import Model, TileHandle
from megazero.zero.gather import Gather
from megazero.zero.tiles import GatheredTile
from megazero.zero.unit import Unit


def tile_of(members: Sequence[tuple[str, nn.Parameter]]) -> TileHandle | None:
    """Return the tile that the one parameter of a unit is; None: the unit has whole parameters."""
    return getattr(members[0][1], "tile_handle", None)


def give_access(model: Model, units: Iterable[Unit], gather: Gather) -> set[str]:
    """Let the model's layers ask for each tile that is among these units; return the names of all units of tiles."""
    tiles = {name: tile for name, members in model.units() if (tile := tile_of(members)) is not None}
    for unit in units:
        if unit.name in tiles:
            tiles[unit.name].access = GatheredTile(unit, gather)
    return set(tiles)
