"""The table of a step's units, of a sharded module."""

import io
import re

import pytest

from tests.library.running import on_ranks, sharded_case, train


def watched(stage: int) -> tuple[str, str]:
    sharded, out = sharded_case("plain", stage), io.StringIO()
    sharded.watch(2, out)
    train(sharded, "plain", steps=4)
    shown = out.getvalue()
    sharded.watch(0)
    train(sharded, "plain", steps=2)
    return shown, out.getvalue()


@pytest.mark.parametrize(("stage", "gathered"), [(0, (0, 0)), (3, (2, 4))])
def test_a_table_of_the_steps_since_the_last_one(stage: int, gathered: tuple[int, int]):
    """In stage 3 the root is gathered once a step, blocks for forward and backward; every unit is reduced once."""
    (shown, after), (silent, _) = on_ranks(2, watched, stage)
    assert silent == "" and after == shown  # rank 0 alone writes, and no more than was asked for
    tables = re.split(r"step \d+\n", shown)[1:]
    assert len(tables) == 2
    for table in tables:
        head, *rows = (line.split() for line in table.splitlines())
        assert head == ["unit", "gathered", "released", "reduced", "MB", "now", "seconds", "waited"]
        assert [row[0] for row in rows] == ["(root)", "blocks.0", "blocks.1", "blocks.2"]
        for row, times in zip(rows, (gathered[0], *[gathered[1]] * 3), strict=True):
            assert [int(cell) for cell in row[1:4]] == [times, times, 2] and row[4] == "0.00" and float(row[5]) >= 0
