"""What the parts of the check find: rows, and how they are shown in lines, in JSON and in Markdown.

A row is a dictionary with a `name`. `fault` says what is wrong, if anything is. `absent` says what this machine has
not, which is no fault. Whatever else is in it is shown as it is.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Row = dict[str, Any]
_WORDS = ("name", "fault", "absent")


@dataclass(frozen=True)
class Asked:
    """The request to a part: which device, and whether sizes are for a try, not for figures."""

    device: torch.device
    tiny: bool

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait for all that the device has queued."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


def told(error: BaseException) -> str:
    """Return an error in one short line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def finite(value: Any) -> Any:
    """Replace what is not a finite number by null: JSON has no other."""
    if isinstance(value, Mapping):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def line(row: Row) -> str:
    """Return a row as a line of text."""
    numbers = [f"{name} {_shown(row[name])}" for name in _columns([row])]
    return "  ".join([f"{row['name']:32}", *numbers, *filter(None, [_verdict(row)])]).rstrip()


def markdown(report: Mapping[str, Any]) -> str:
    """Return a whole report: what it belongs to, and a table for each part."""
    facts = [
        f"| {name} | {_shown(value)} |"
        for name, value in report["machine"].items()
        if name != "name" and _is_plain(value)
    ]
    lines = ["# GPU check", "", "| of | |", "|---|---|", *facts, ""]
    lines += [f"{report['failures']} failures, {report['seconds']:.0f} s", ""]
    for part in report["parts"].values():
        lines += [f"## {part['title']} ({part['seconds']:.0f} s)", "", *_table(part["rows"]), ""]
    return "\n".join(lines)


def _table(rows: Sequence[Row]) -> list[str]:
    columns = _columns(rows)
    lines = ["| " + " | ".join(["", *columns, ""]) + " |", "|---" * (len(columns) + 2) + "|"]
    for row in rows:
        cells = [_shown(row.get(name)) for name in columns]
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in [row["name"], *cells, _verdict(row)]) + " |")
    return lines


def _columns(rows: Sequence[Row]) -> list[str]:
    """Return the names of what can be shown in a table, in the order of their first coming."""
    found = (name for row in rows for name, value in row.items() if name not in _WORDS and _is_plain(value))
    return list(dict.fromkeys(found))


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float)


def _verdict(row: Row) -> str:
    if row.get("fault"):
        return f"FAILED {row['fault']}"
    return f"not here: {row['absent']}" if row.get("absent") else ""


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value)
