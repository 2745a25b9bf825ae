"""The results of the parts of the check: rows, and their output as lines, JSON and Markdown.

A row is a dictionary with a `name`. `fault` says what is wrong, if anything. `absent` says what this machine lacks,
which is not a fault. All other entries are shown as columns.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

Row = dict[str, Any]
_WORDS = ("name", "fault", "absent")


@dataclass(frozen=True)
class Asked:
    """The request to a part: the device, and whether to use tiny sizes, for a trial run without meaningful figures."""

    device: torch.device
    tiny: bool

    @property
    def on_gpu(self) -> bool:
        """Return whether the device is a GPU."""
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait for all work that is queued on the device."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


def error_line(error: BaseException) -> str:
    """Return an error as one short line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def finite(value: Any) -> Any:
    """Replace NaN and infinities by None, because JSON cannot hold them."""
    if isinstance(value, Mapping):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def line(row: Row) -> str:
    """Return a row as a line of text."""
    numbers = [f"{name} {_shown(row[name])}" for name in _columns(row)]
    return "  ".join([f"{row['name']:32}", *numbers, *filter(None, [_verdict(row)])]).rstrip()


def markdown(report: Mapping[str, Any]) -> str:
    """Return a report in Markdown: the facts of the machine, then tables of the rows of each part.

    A row with other columns than the previous row begins a new table. docs/gpu.md explains the columns.
    """
    facts = {name: value for name, value in report["machine"].items() if name != "name" and _is_plain(value)}
    head = f"{report['failures']} failures, {report['seconds']:.0f} s, in the rows below. [gpu.md](gpu.md) says how the"
    head += " check ran and explains its [columns](gpu.md#columns)."
    lines = ["# GPU check", "", head, "", "| of | |", "|---|---|"]
    lines += [f"| {name} | {_shown(value)} |" for name, value in facts.items()]
    for part in report["parts"].values():
        lines += ["", f"## {part['title']} ({part['seconds']:.0f} s)"]
        for columns, rows in groupby(part["rows"], _columns):
            lines += ["", f"| {' | '.join(['', *columns])} |", "|---" * (len(columns) + 1) + "|"]
            for row in rows:
                cells = [
                    " ".join(filter(None, [row["name"].strip(), _verdict(row)])),
                    *(_shown(row[c]) for c in columns),
                ]
                lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join([*lines, ""])


def _columns(row: Row) -> list[str]:
    return [name for name, value in row.items() if name not in _WORDS and _is_plain(value)]


def summary(report: Mapping[str, Any], shown: Sequence[str], most: int = 11_500) -> str:
    """Return a summary of a report: faults, missing tools, and figures.

    Args:
        shown: the parts whose rows are shown, most important first; other parts show the maximum of each number.
        most: largest number of characters.
    """
    parts, machine = report["parts"], report["machine"]
    facts = [str(machine[name]) for name in ("gpu", "torch", "python", "driver", "commit") if machine.get(name)]
    lines = [f"SUMMARY: {report['failures']} failures, {report['seconds']:.0f} s; {', '.join(facts)}"]
    wrong = [(name, row) for name, part in parts.items() for row in part["rows"] if row.get("fault")]
    lines += [f"FAILED {name}: {row['name']}: {row['fault']}"[:260] for name, row in wrong]
    for name, part in parts.items():
        lines += [f"{name} ({part['seconds']:.0f} s): {_most(part['rows'], name not in shown)}"[:260]]
    lacking = [(name, row) for name, part in parts.items() for row in part["rows"] if row.get("absent")]
    lines += [f"not measured, {name}: {row['name']}: {row['absent']}"[:160] for name, row in lacking]
    for name in [each for each in shown if each in parts]:
        lines += [f"-- {parts[name]['title']}"]
        lines += [line(row)[:170] for row in parts[name]["rows"] if not row.get("fault") and not row.get("absent")]
    kept = [text for number, text in enumerate(lines) if sum(map(len, lines[: number + 1])) + number < most]
    return "\n".join([*kept, *([f"and {len(lines) - len(kept)} lines more"] if len(kept) < len(lines) else [])])


def _most(rows: Sequence[Row], with_numbers: bool) -> str:
    """Return the number of rows and, if `with_numbers`, the maximum of each of their numbers."""
    numbers: dict[str, float] = {}
    for row in rows if with_numbers else []:
        for name, value in row.items():
            if isinstance(value, float):
                numbers[name] = max(numbers.get(name, value), value)
    return ", ".join([f"{len(rows)} rows", *(f"{name} <= {_shown(value)}" for name, value in numbers.items())])


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float)


def _verdict(row: Row) -> str:
    if row.get("fault"):
        return f"FAILED {row['fault']}"
    return f"not measured: {row['absent']}" if row.get("absent") else ""


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if 1e4 <= abs(value) < 1e7 else f"{value:.4g}"
    return "-" if value is None else str(value)
