"""Tiles of a weight: equal, of at most so many elements, and as few as can be."""

from hypothesis import given
from hypothesis import strategies as st

from megazero.base.tiles import tile_elements, tile_rows


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 40))
def test_tiles_are_equal_and_as_large_as_fits(rows: int, width: int, room: int) -> None:
    most = width * room
    each = tile_rows(rows, width, most)
    assert rows % each == 0 and each * width <= max(most, width)
    assert each == max(n for n in range(1, rows + 1) if rows % n == 0 and (n * width <= most))


def test_without_a_size_nothing_is_cut() -> None:
    assert tile_rows(7, 5, None) == 7 and tile_elements(None, 4) is None
    assert tile_rows(8, 5, 40) == 8 and tile_rows(8, 5, 39) == 4
    assert tile_elements(1.5, 2) == 1.5 * 2**19
