"""Describe what a sharded module holds, in tables, and in words what it was given or asked for."""

import math
from collections.abc import Sequence

from torch import Tensor

from megazero.base.terminal import in_columns
from megazero.comm.pool import same_place
from megazero.library.assembly import Assembly
from megazero.library.parts import Part
from megazero.library.tables import RowShard
from megazero.zero.unit import Unit


def parts_table(assembly: Assembly) -> str:
    """Return a table: of each part its parameters, and the bytes of them that rest on this rank, by kind."""
    heads = ("part", "parameters", "frozen", "parameters here", "gradients here", "optimizer here")
    rows = [heads, *(_row(part, len(assembly.optimizer.STATE)) for part in assembly.parts if part.units)]
    rows += map(_table_row, assembly.tables.shards)
    axes = assembly.memory.axes
    groups = f", {axes.replica.size} times" if axes.replica.size > 1 else ""
    return "\n".join(
        [f"ZeRO stage {assembly.stage} over {axes.shard.size} ranks{groups}; bytes of one rank", *in_columns(rows)]
    )


def _row(part: Part, states: int) -> tuple[str, ...]:
    trained = [unit for unit in part.units if unit.trainable]
    frozen = [unit for unit in part.units if not unit.trainable]
    held = [
        sum(unit.resting.parameters.values.nbytes for unit in part.units),
        sum(unit.resting.gradients.values.nbytes for unit in trained),
        sum(_optimizer_bytes(unit, states) for unit in trained),
    ]
    counts = [_elements(trained), _elements(frozen), *held]
    return (part.name, *(f"{count:,}" for count in counts))


def _table_row(table: RowShard) -> tuple[str, ...]:
    whole = math.prod(table.shape)
    held = table.values.nbytes, 0, sum(state.nbytes for state in table.state.values())
    counts = (whole, 0, *held) if table.state else (0, whole, *held)
    return (f"{table.name} (rows)", *(f"{count:,}" for count in counts))


def _elements(units: Sequence[Unit]) -> int:
    return sum(interval.stop - interval.start for unit in units for interval in unit.layout.intervals)


def _optimizer_bytes(unit: Unit, states: int) -> int:
    own = not same_place(unit.masters, unit.resting.own_parameters.values)
    return (states + own) * unit.masters.nbytes


def loss_text(loss: object) -> str:
    """Return what was given as a loss, in words: its shape, and that it has no graph if so; or another type."""
    if not isinstance(loss, Tensor):
        return type(loss).__name__
    return f"shape {tuple(loss.shape)}" + ("" if loss.requires_grad else " without a graph")
