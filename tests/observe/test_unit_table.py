"""The table of a step's units, of a run and of a sharded module."""

import io
import re
from pathlib import Path

import pytest

from megazero.observe.unit_table import UnitEvents, UnitTableSink
from tests.library.running import on_ranks, sharded_case, train
from tests.tiny_run import TinyData
from tests.tiny_run import train as train_run


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


def test_events_are_counted_while_somebody_looks():
    sharded = sharded_case("plain", 3)
    events = UnitEvents(sharded._assembly.values.units, {})
    stream = io.StringIO()
    sink = UnitTableSink(events, stream)
    train(sharded, "plain", steps=1)
    sink.start()
    train(sharded, "plain", steps=1)
    sink.row({})
    sink.close()
    train(sharded, "plain", steps=1)
    sink.row({})
    first, second = stream.getvalue().split("unit")[1:]
    for table, reduced in ((first, "1"), (second, "0")):  # one rank gathers nothing
        assert all(line.split()[1:4] == ["0", "0", reduced] for line in table.splitlines()[1:])


def test_a_run_shows_it_with_each_row(tiny_data: TinyData, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    train_run(tiny_data.load(tmp_path / "run", "observe.table=true", "run.steps=2", "zero.stage=3"))
    said = capsys.readouterr().out
    assert said.count("seconds waited") == 2 and "head " in said
