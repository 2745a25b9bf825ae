"""Size the tiles into which a large weight is cut along its first dimension (`zero.tile_mb`).

All tiles of a weight are equal, so that their buffers are: their rows divide its rows.
"""

_MIB = 2**20


def tile_elements(tile_mb: float | None, item: int) -> int | None:
    """Return the most elements of a tile; None: no weight is cut.

    Args:
        item: bytes of an element.
    """
    return None if tile_mb is None else int(tile_mb * _MIB) // item


def tile_rows(rows: int, width: int, most: int | None) -> int:
    """Return the rows of each tile of a weight: the most that divide its rows and fit; all of them if it is not cut.

    Args:
        rows: of the weight, on this rank.
        width: elements of a row.
        most: elements of a tile, a row at least.
    """
    if most is None or rows * width <= most:
        return rows
    assert most >= width, f"a row of {width} elements is no part of a tile of {most}"
    count = -(-rows // (most // width))
    while rows % count:
        count += 1
    return rows // count
