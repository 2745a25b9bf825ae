"""Describe what a sharded module holds, in tables, and in words what it was given or asked for."""

from collections.abc import Sequence

from torch import Tensor, nn

from megazero.base.terminal import in_columns
from megazero.comm.pool import same_place
from megazero.library.built import BuiltPart
from megazero.library.tables import RowShard
from megazero.zero.unit import Unit

# What users of torch, FSDP2 and DeepSpeed look for in `Sharded`, and what there is instead.
_INSTEAD = {
    "parameters": "use sharded.module.parameters(), and sharded.gathered() for values",
    "named_parameters": "use sharded.module.named_parameters(), and sharded.gathered() for values",
    "state_dict": "use sharded.full_state_dict()",
    "zero_grad": "leave it out, sharded.step() clears the gradients",
    "clip_grad_norm_": "give megazero.shard(..., clip=1.0)",
    "forward": "call sharded(...)",
    "no_sync": "use sharded.backward(loss, last=False)",
    "save_checkpoint": "use sharded.save(folder)",
    "load_checkpoint": "use sharded.load(folder)",
}


def parts_table(parts: Sequence[BuiltPart], tables: Sequence[RowShard], state_names: Sequence[str], stage: int) -> str:
    """Return a table: of each part its parameters, and the bytes of them that rest on this rank, by kind."""
    heads = ("part", "parameters", "frozen", "parameters here", "gradients here", "optimizer here")
    rows = [heads, *(_row(part, len(state_names)) for part in parts if part.units), *map(_table_row, tables)]
    axes = parts[0].units[0].axes if parts[0].units else parts[1].units[0].axes
    groups = f", {axes.replica.size} times" if axes.replica.size > 1 else ""
    return "\n".join([f"ZeRO stage {stage} over {axes.shard.size} ranks{groups}; bytes of one rank", *in_columns(rows)])


def _row(part: BuiltPart, states: int) -> tuple[str, ...]:
    trained = [unit for unit in part.units if unit.trainable]
    frozen = [unit for unit in part.units if not unit.trainable]
    held = [
        sum(unit.resting.parameters.values.nbytes for unit in part.units),
        sum(unit.resting.gradients.values.nbytes for unit in trained),
        sum(_optimizer_bytes(unit, states) for unit in trained),
    ]
    counts = [_elements(trained), _elements(frozen), *held]
    return (part.part.name, *(f"{count:,}" for count in counts))


def _table_row(table: RowShard) -> tuple[str, ...]:
    whole = table.whole * table.values.shape[1]
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


def no_attribute(name: str, module: nn.Module | None) -> str:
    """Return in words that `Sharded` has no such attribute, and what to use instead where there is something."""
    own = f"use sharded.module.{name}" if hasattr(module, name) else ""
    do = _INSTEAD.get(name, own)
    return f"Sharded has no attribute {name!r}" + (f": {do}" if do else "")
