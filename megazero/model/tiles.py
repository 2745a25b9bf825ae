"""Multiply by weights that are never whole: they are cut into tiles, used one by one (`zero.tile_mb`).

A weight is cut along its first dimension, which the tensor axis splits too, so a tile is one interval of the flat
parameter. Each is a unit of its own, so its gathering, its gradient and its update are too. While a product uses one
tile the next one is on its way; so of a weight two tiles are there at most (memory-centric tiling: Rajbhandari et al.
2021, ZeRO-Infinity, arXiv 2104.07857, section 5.1.3).

    column   weight_OI   y[:, tile] = x weight[tile]^T + bias[tile]      dx += dy[:, tile] weight[tile]
    row      weight_IO   y += x[:, tile] weight[tile] (+ bias)           dx[:, tile] = dy weight[tile]^T

Every element is made of the same products as untiled. A sum over tiles (dx of a column product, y of a row product)
adds them in another order, but always in the same one. The weight's gradient needs no tile to be there: its rows are
made from dy and x after dx, beside the sum over the tensor axis, the last tile first, as backward goes.

Shapes as in `linear.py`.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megazero.base.tiles import tile_rows
from megazero.comm.regions import Region
from megazero.model.contract import TileAccess
from megazero.model.parameter import Declaration, declaration_of
from megazero.model.tape import Owner, Tape


class Tile:
    """Rows of a weight, with memory only while they are used.

    Attributes:
        owner: of its part of the weight.
        access: brings it and lets it go; None: it is there all the time.
    """

    def __init__(self, weight: nn.Parameter):
        self.owner: dict[str, Any] = {}
        self.access: TileAccess | None = None
        self._put(weight)

    @property
    def weight(self) -> nn.Parameter:
        return self.owner["weight"]

    def materialise(self, weight: nn.Parameter) -> None:
        """Put a parameter that has memory in the place of the declared one."""
        weight.declaration = declaration_of(self.weight)  # type: ignore[attr-defined]
        self._put(weight)

    def _put(self, weight: nn.Parameter) -> None:
        weight.tile_handle = self  # type: ignore[attr-defined]
        self.owner["weight"] = weight


def cut(weight: nn.Parameter, most: int | None) -> list[Tile]:
    """Return the tiles of a declared weight, in their order; none where it is small enough to stay whole.

    Args:
        most: elements of a tile; None: nothing is cut.
    """
    whole = declaration_of(weight)
    rows = tile_rows(whole.local_shape[0], whole.row, most)
    if rows == whole.local_shape[0]:
        return []
    return [Tile(_declared(whole, first, rows)) for first in range(0, whole.local_shape[0], rows)]


def _declared(whole: Declaration, first: int, rows: int) -> nn.Parameter:
    """Return some rows of this rank's part of a weight, declared."""
    shape = (rows, *whole.shape[1:])
    parameter = nn.Parameter(torch.empty(shape, device="meta"))
    place = (whole.first_row + first, shape)
    parameter.declaration = Declaration(  # type: ignore[attr-defined]
        whole.shape, whole.std, whole.mean, whole.decay, whole.split, *place
    )
    return parameter


def visit(tiles: Sequence[Tile]) -> Iterator[Tensor]:
    """Yield the values of one tile after the other, each there until the next one is asked for."""
    following = [*tiles[1:], None]
    for tile, after in zip(tiles, following, strict=True):
        if tile.access is not None:
            tile.access.acquire()
        if after is not None and after.access is not None:
            after.access.prefetch()
        yield tile.weight.detach()
        if tile.access is not None:
            tile.access.release()


def _places(tiles: Sequence[Tile]) -> list[slice]:
    """Return the rows of each tile in the weight."""
    rows = declaration_of(tiles[0].weight).local_shape[0]
    return [slice(i * rows, (i + 1) * rows) for i in range(len(tiles))]


class TiledColumnProducts:
    """`ColumnProducts` by weights in tiles.

    Args:
        weights: of each the tiles, and the owner of its bias.
    """

    def __init__(self, region: Region, *weights: tuple[Sequence[Tile], Owner]):
        self.region, self._alone = region, region.axis.size == 1
        self._weights = [(tiles, _places(tiles), biased) for tiles, biased in weights]
        self.owners = _owners(*weights)

    def run(self, tape: Tape, x_nI: Tensor) -> tuple[Tensor, ...]:
        """Return gather(x) weight^T + bias, [N, O], of each weight."""
        slots = [
            ([tape.use(tile.weight) for tile in tiles], tape.use(biased.get("bias")))
            for tiles, _, biased in self._weights
        ]
        tape.keep((x_nI, slots))
        x_NI = x_nI if self._alone else self.region.gather(x_nI, "forward").wait()
        return tuple(_columns(x_NI, tiles, places, biased.get("bias")) for tiles, places, biased in self._weights)

    def back(self, tape: Tape, *grads_NO: Tensor) -> Tensor:
        """Return the gradient of x."""
        x_nI, slots = tape.take()
        gathering = None if self._alone else self.region.gather(x_nI, "again")
        grad_x: Tensor | None = None
        for (tiles, places, _), grad_NO in zip(self._weights[::-1], grads_NO[::-1], strict=True):
            for rows, tile_oI in zip(places[::-1], visit(tiles[::-1]), strict=True):
                part = grad_NO[:, rows]
                grad_x = torch.mm(part, tile_oI) if grad_x is None else grad_x.addmm_(part, tile_oI)
        assert grad_x is not None, "there is a weight"
        summing = None if self._alone else self.region.sum(grad_x, "backward")
        x_NI = x_nI if gathering is None else gathering.wait()
        for (_, places, _), (weight_slots, bias_slot), grad_NO in zip(
            self._weights[::-1], slots[::-1], grads_NO[::-1], strict=True
        ):
            for rows, slot in zip(places[::-1], weight_slots[::-1], strict=True):
                slot.add_product(grad_NO[:, rows].T, x_NI)
            if bias_slot is not None:
                bias_slot.add_sum(grad_NO)
        return grad_x if summing is None else summing.wait()


class TiledRowProduct:
    """`RowProduct` by a weight in tiles.

    Args:
        biased: the owner of the bias.
    """

    def __init__(self, region: Region, tiles: Sequence[Tile], biased: Owner):
        self.region, self._alone = region, region.axis.size == 1
        self._tiles, self._places, self._biased = tiles, _places(tiles), biased
        self._width = declaration_of(tiles[0].weight).local_shape[1]
        self.owners = _owners((tiles, biased))

    def run(self, tape: Tape, x_NI: Tensor, *, skip_output: bool = False) -> Tensor:
        """Return sum(x weight) + bias, [n, O]; `skip_output` as of `RowProduct`."""
        bias_O, axis = self._biased.get("bias"), self.region.axis
        slots = [tape.use(tile.weight) for tile in self._tiles]
        tape.keep((x_NI, slots, tape.use(bias_O)))
        if skip_output:
            rows = len(x_NI) // (axis.size if self.region.sequence else 1)
            return x_NI.new_zeros(()).expand(rows, self._width)
        partial: Tensor | None = None
        for rows, tile_iO in zip(self._places, visit(self._tiles), strict=True):
            part = x_NI[:, rows]
            if partial is not None:
                partial.addmm_(part, tile_iO)
            elif bias_O is None or axis.rank:  # the first rank's sum brings the bias along
                partial = torch.mm(part, tile_iO)
            else:
                partial = torch.addmm(bias_O, part, tile_iO)
        assert partial is not None, "there is a tile"
        return partial if self._alone else self.region.sum(partial, "forward").wait()

    def back(self, tape: Tape, grad_nO: Tensor) -> Tensor:
        """Return the gradient of x, for a contiguous one of the result."""
        x_NI, slots, bias_slot = tape.take()
        gathering = None if self._alone else self.region.gather(grad_nO, "backward")
        if bias_slot is not None:
            bias_slot.add_sum(grad_nO)
        grad_NO = grad_nO if gathering is None else gathering.wait()
        grad_x = torch.empty_like(x_NI)
        for rows, tile_iO in zip(self._places[::-1], visit(self._tiles[::-1]), strict=True):
            torch.mm(grad_NO, tile_iO.T, out=grad_x[:, rows])
        for rows, slot in zip(self._places[::-1], slots[::-1], strict=True):
            slot.add_product(x_NI[:, rows].T, grad_NO)
        return grad_x


def _columns(x_NI: Tensor, tiles: Sequence[Tile], places: Sequence[slice], bias_O: Tensor | None) -> Tensor:
    """Return x weight^T + bias, [N, O], of one weight."""
    y_NO = x_NI.new_empty(len(x_NI), places[-1].stop)
    for rows, tile_oI in zip(places, visit(tiles), strict=True):
        if bias_O is None:
            torch.mm(x_NI, tile_oI.T, out=y_NO[:, rows])
        else:
            torch.addmm(bias_O[rows], x_NI, tile_oI.T, out=y_NO[:, rows])
    return y_NO


def _owners(*weights: tuple[Sequence[Tile], Owner]) -> tuple[Owner, ...]:
    """Return the owners of all tiles, then those of biases."""
    return (*(tile.owner for tiles, _ in weights for tile in tiles), *(biased for _, biased in weights))
