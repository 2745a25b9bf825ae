"""Write and read metrics.jsonl: one JSON object per logged step, strictly valid, appended whole.

Floats are written as the shortest text that reads back to the same float (repr), so that two runs can be compared bit
for bit. JSON has no word for a number that is not finite: such a value is written as null. No ambiguity follows: where
the mfu is null the peak is unknown, where a loss or a norm is null it was inf or nan (a skipped step of fp16, say).

The file is opened for each row. A run's folder may be moved, cleaned or filled up while it trains: an open handle would
go on writing into a deleted file without an error. A row that does not fit on the disk is taken back whole, so the file
never holds half a line that a later row would run into.
"""

import json
import os
from collections.abc import Iterator, Mapping
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

from megazero.base.files import replace_file
from megazero.base.reading import open_regular, parse_object
from megazero.observe.numbers import Value, finite
from megazero.observe.sinks import Sink


def encode(row: Mapping[str, Value]) -> bytes:
    """Return one line of metrics.jsonl, newline included."""
    return (json.dumps(finite(row), allow_nan=False) + "\n").encode("ascii")


class JsonlSink(Sink):
    """A sink that appends rows to a file, whose folder must exist."""

    def __init__(self, path: Path):
        self.path = path

    def row(self, row: Mapping[str, Value]) -> None:
        """Append one row; it is passed to the system before this returns.

        Raises:
            OSError: the line could not be written; the file is as it was.
        """
        line = encode(row)
        with open(self.path, "ab", buffering=0) as file:
            start = file.seek(0, os.SEEK_END)
            try:
                if (written := file.write(line)) != len(line):
                    raise OSError(f"{self.path}: {written} of {len(line)} bytes written, disk full")
            except OSError:
                file.truncate(start)
                raise


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return all rows of a metrics.jsonl. A torn last line (the run was killed while writing it) is left out.

    Raises:
        ValueError: a line other than the last is no row, or steps do not rise.
        OSError: the file cannot be read, or is no regular file.
    """
    rows = [row for row, _ in _rows(path)]
    for before, row in pairwise(rows):
        if row["step"] <= before["step"]:
            raise ValueError(f"expected a step beyond {before['step']}, got {row['step']}")
    return rows


def drop_rows_after(path: Path, step: int) -> dict[str, Any] | None:
    """Remove the rows beyond `step`, and a torn last line, in one atomic replacement, before a run resumes.

    So are rows of a job that was delayed while another took its folder over, where they are between the other's. A
    file that has nothing to remove is not touched. Returns the last row, None if there is none.

    Raises:
        ValueError: a line is no row.
        OSError: the file cannot be read or replaced.
    """
    if not path.exists():
        return None
    kept: list[tuple[int, bytes]] = []
    # What follows the first row beyond is dropped, whatever it is.
    for row, line in takewhile(lambda pair: pair[0]["step"] <= step, _rows(path)):
        while kept and kept[-1][0] >= row["step"]:
            kept.pop()
        kept.append((row["step"], line))
    lines = [line for _, line in kept]
    if sum(map(len, lines)) != path.stat().st_size:
        replace_file(path, lines)
    return parse_object(lines[-1]) if lines else None


def _rows(path: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield each row and its line. Raises ValueError: a line is no row."""
    with open_regular(path) as descriptor, open(descriptor, "rb", closefd=False) as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):  # torn
                return
            try:
                row = parse_object(line.rstrip(b"\n"))
                step = row.get("step")
                if type(step) is not int or not 0 < step < 2**31:
                    raise ValueError(f"expected a step, got {step!r:.40}")
            except ValueError as error:
                raise ValueError(f"line {number:,}: {error}") from None
            yield row, line
