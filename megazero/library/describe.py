"""Describe what a sharded module holds, in a table."""

import math
from collections.abc import Iterator

from megazero.base.terminal import in_columns
from megazero.comm.pool import same_place
from megazero.library.assembly import Assembly

_HEADS = ("part", "parameters", "frozen", "parameters here", "gradients here", "optimizer here")


def parts_table(assembly: Assembly) -> str:
    """Return a table: of each part its parameters, and the bytes of them that rest on this rank, by kind."""
    axes = assembly.memory.axes
    groups = f", {axes.replica.size} times" if axes.replica.size > 1 else ""
    title = f"ZeRO stage {assembly.stage} over {axes.shard.size} ranks{groups}; bytes of one rank"
    rows = [(name, *(f"{count:,}" for count in counts)) for name, counts in _rows(assembly)]
    return "\n".join([title, *in_columns([_HEADS, *rows])])


def _rows(assembly: Assembly) -> Iterator[tuple[str, list[int]]]:
    for part in assembly.parts:
        counts = [0] * 5
        for unit in part.units:
            counts[not unit.trainable] += sum(i.stop - i.start for i in unit.layout.intervals)
            counts[2] += unit.resting.parameters.values.nbytes
            if unit.trainable:
                own = not same_place(unit.masters, unit.resting.own_parameters.values)
                counts[3] += unit.resting.gradients.values.nbytes
                counts[4] += (len(assembly.optimizer.STATE) + own) * unit.masters.nbytes
        if part.units:
            yield part.name, counts
    for table in assembly.tables.shards:
        counts = [0, 0, table.values.nbytes, 0, sum(state.nbytes for state in table.state.values())]
        counts[not table.state] = math.prod(table.shape)
        yield f"{table.name} (rows)", counts
