"""Show the rows of a certificate: as text in 60 columns, and for programs."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megazero.base.terminal import WIDEST_TABLE, wrapped
from megazero.config.schema import Config
from megazero.tools.certify.certify import Row, tolerance_for
from megazero.tools.certify.layouts import OPTIONS

# For each column of numbers: its name, its measures, its tolerance.
_COLUMNS = (
    ("loss", ("loss",), "loss"),
    ("norm", ("gradient norm",), "norm"),
    ("gradients", ("first gradients",), "gradients"),
    ("weights", ("weights",), "weights"),
    ("moments", ("first moment", "second moment"), "states"),
    ("update", ("update",), "states"),
    ("size", ("size of updates",), "sizes"),
)
_SHOWN = (*OPTIONS, "chunks", "partition")  # fields of a layout in JSON
_AWAY = {"cpu": "host", "nvme": "disk"}  # where kept block inputs rest, in JSON


def table(rows: Sequence[Row], config: Config, steps: int) -> str:
    """Return the rows as text in 60 columns, with the numbers of each layout below it."""
    number, most = sum(row.layout.ranks > 1 for row in rows), tolerance_for(config)
    said = f"{number} layouts, {steps} steps in {config.precision.dtype}, against one process, and that against an "
    said += "independent reference: relative differences"
    if any(tolerance_for(config, row.layout) != most for row in rows):
        said += "; layouts with integers or 16-bit sums have wider tolerances"
    allowed = (f"{getattr(most, column[2]):.0e}" for column in _COLUMNS)
    lines = [*wrapped(said, WIDEST_TABLE), "", "layout"]
    lines += [_line("same bits", *(column[0] for column in _COLUMNS)), _line("allowed", *allowed)]
    for row in rows:
        bitwise = "yes" if row.bitwise else "no" if row.times else ""
        numbers = (f"{value:.0e}" if value else "0" for value in _numbers(row).values())
        lines += [f"{row.layout}, {row.layout.ranks} ranks", _line(bitwise, *numbers)]
        lines += [f"  BEYOND ITS TOLERANCE: {row.fault}"] if row.fault else []
    return "\n".join(lines)


def as_json(rows: Sequence[Row], config: Config, steps: int) -> dict[str, Any]:
    """Return the rows as a JSON object."""
    tolerance = asdict(tolerance_for(config))
    return {"steps": steps, "dtype": config.precision.dtype, "tolerance": tolerance, "rows": list(map(_values, rows))}


def _values(row: Row) -> dict[str, Any]:
    options = {name: getattr(row.layout, name) for name in _SHOWN}
    options |= {"offload": row.layout.offloaded, "inputs_away": _AWAY.get(row.layout.offload)}
    times = {measure: times if math.isfinite(times) else None for measure, times in row.times.items()}  # for JSON
    said = {"bitwise": row.bitwise, "fault": row.fault, "times": times, "layout": options, "name": str(row.layout)}
    return {**said, "ranks": row.layout.ranks, **_numbers(row)}


def _numbers(row: Row) -> dict[str, float]:
    """Return the largest relative difference of each column."""
    return {column[0]: max(row.worst.get(measure, 0.0) for measure in column[1]) for column in _COLUMNS}


def _line(first: str, *numbers: str) -> str:
    columns = zip(_COLUMNS, numbers, strict=True)
    return f"{first:>9}" + "".join(f"{number:>{max(len(column[0]), 5) + 1}}" for column, number in columns)
