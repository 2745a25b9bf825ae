"""Write and read metrics.jsonl: one JSON object per logged step, strictly valid, appended whole.

Floats are written as the shortest text that reads back to the same float (repr), so that two runs can be compared bit
for bit. JSON cannot express numbers that are not finite: they are written as null. This is not ambiguous: a null mfu
means that the peak is unknown, a null loss or norm that it was inf or nan (as in a skipped step of fp16).

The file is opened for each row. A run's folder may be moved, cleaned or filled up while it trains: an open handle would
go on writing into a deleted file without an error. If a row does not fit on the disk, all of it is removed, so the
file never holds half a line to which a later row would be appended.
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
        """Append one row; it is passed to the operating system before this returns.

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
            raise ValueError(f"expected a step after {before['step']}, got {row['step']}")
    return rows


def drop_rows_after(path: Path, step: int) -> dict[str, Any] | None:
    """Remove the rows beyond `step`, and a torn last line, in one atomic replacement, before a run resumes.

    Also remove rows of a delayed job that are between the rows of the job that took its folder over. A file with
    nothing to remove is not touched. Return the last row, or None if there is none.

    Raises:
        ValueError: a line is no row.
        OSError: the file cannot be read or replaced.
    """
    if not path.exists():
        return None
    kept: list[tuple[int, bytes]] = []
    # Everything after the first row beyond `step` is dropped, even if it is damaged.
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
