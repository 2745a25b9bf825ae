"""Write and read metrics.jsonl: one JSON object per logged step, strictly valid, appended whole.

Floats are written as the shortest text that reads back to the same float (repr), so that two runs can be compared bit
for bit. JSON has no word for a number that is not finite: such a value is written as null. No ambiguity follows: where
the mfu is null the peak is unknown, where a loss or a norm is null it was inf or nan (a skipped step of fp16, say).

The file is opened for each row. A run's folder may be moved, cleaned or filled up while it trains: an open handle would
go on writing into a deleted file without an error. A row that does not fit on the disk is taken back whole, so the file
never holds half a line that a later row would run into.
"""

import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megazero.base.files import replace_file
from megazero.base.reading import MIB, open_regular, parse_object
from megazero.observe.numbers import Value, finite

_LINE_BYTES = 64 << 10


def encode(row: Mapping[str, Value]) -> bytes:
    """Return one line of metrics.jsonl, newline included."""
    return (json.dumps(finite(row), allow_nan=False) + "\n").encode("ascii")


class JsonlSink:
    """A sink that appends rows to a file, whose folder must exist."""

    def __init__(self, path: Path):
        self.path = path

    def start(self) -> None:
        """Do nothing: the file is opened for each row."""

    def row(self, row: Mapping[str, Value]) -> None:
        """Append one row; it is passed to the system before this returns.

        Raises:
            OSError: the line could not be written; the file is as it was.
        """
        line = encode(row)
        with open(self.path, "ab", buffering=0) as file:
            start = file.seek(0, os.SEEK_END)
            try:
                written = file.write(line)
            except OSError:
                file.truncate(start)
                raise
            if written != len(line):
                file.truncate(start)
                raise OSError(f"{self.path}: {written} of {len(line)} bytes written, disk full")

    def close(self) -> None:
        """Do nothing: no file is held open."""


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return all rows of a metrics.jsonl. A torn last line (the run was killed while writing it) is left out.

    Raises:
        ValueError: a line other than the last is no row, or steps do not rise.
        OSError: the file cannot be read, or is no regular file.
    """
    return [row for row, _ in _rows(path)]


def drop_rows_after(path: Path, step: int, warn: Callable[[str], object]) -> dict[str, Any] | None:
    """Remove the rows beyond `step`, and a torn last line, in one atomic replacement, before a run resumes.

    A file that has nothing to remove is not touched. A job that was delayed while another took its folder over may
    have written rows between the other's; those written later stay. Returns the last row, None if there is none.

    Args:
        warn: called about rows that were between others' in this way.

    Raises:
        ValueError: a line up to the first row beyond `step` is no row.
        OSError: the file cannot be read or replaced.
    """
    if not path.exists():
        return None
    try:
        return _cut(path, step)
    except NotRisingError:
        lost = _put_in_order(path)
        warn(f"{path}: {lost} row{'s' * (lost > 1)} of another job, between those of this run, left out")
        return _cut(path, step)


class NotRisingError(ValueError):
    """An error for a row whose step is not beyond that of the row before."""


def _cut(path: Path, step: int) -> dict[str, Any] | None:
    last, end = None, 0
    for row, row_end in _rows(path):
        if row["step"] > step:
            break
        last, end = row, row_end
    if end != path.stat().st_size:
        with path.open("rb") as file:
            replace_file(path, iter(lambda: file.read(min(MIB, end - file.tell())), b""))
    return last


def _put_in_order(path: Path) -> int:
    """Remove rows that a later row of the same or a lower step replaces; return how many."""
    kept: list[dict[str, Any]] = []
    lost = 0
    for row, _ in _rows(path, rising=False):
        while kept and kept[-1]["step"] >= row["step"]:
            kept.pop()
            lost += 1
        kept.append(row)
    replace_file(path, (json.dumps(row, allow_nan=False).encode("ascii") + b"\n" for row in kept))
    return lost


def _rows(path: Path, *, rising: bool = True) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield each row, and the offset where its line ends; one line at a time, for files of any size.

    Raises:
        NotRisingError: a step is not beyond the one before, unless that does not matter here.
        ValueError: a line is no row.
    """
    with open_regular(path) as descriptor, open(descriptor, "rb", closefd=False) as file:
        before, end = 0, 0
        for number in itertools.count(1):
            line = file.readline(_LINE_BYTES + 1)
            if not line.endswith(b"\n") and len(line) <= _LINE_BYTES:
                return  # the end, or a torn line
            end += len(line)
            try:
                row = _checked(line)
            except ValueError as error:
                raise ValueError(f"line {number:,}: {error}") from None
            if rising and row["step"] <= before:
                raise NotRisingError(f"line {number:,}: expected a step beyond {before}, got {row['step']}")
            before = row["step"]
            yield row, end


def _checked(line: bytes) -> dict[str, Any]:
    """Return the row of a line; raises ValueError if it is none."""
    if len(line) > _LINE_BYTES:
        raise ValueError(f"expected at most {_LINE_BYTES:,} bytes, got more")
    row = parse_object(line.rstrip(b"\n"))
    step = row.get("step")
    if type(step) is not int or not 0 < step < 2**31:
        raise ValueError(f"expected a step, got {step!r:.40}")
    for key, value in row.items():
        values = value.values() if isinstance(value, dict) else (value,)
        if not all(map(_is_number, values)):
            raise ValueError(f"{key!r:.40} is no number: {value!r:.40}")
    return row


def _is_number(value: object) -> bool:
    """Return True for a value that a row may hold: None, a finite number (not JSON's 1e999), an integer of 64 bits."""
    if type(value) is int:
        return abs(value) < 2**63
    return value is None or (type(value) is float and math.isfinite(value))
