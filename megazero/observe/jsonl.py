"""metrics.jsonl: one JSON object per logged step, strictly valid, appended whole.

Floats are written as the shortest text that reads back to the same float (repr), so that two runs can be compared bit
for bit. JSON has no word for a number that is not finite: such a value is written as null. No ambiguity follows: where
the mfu is null the peak is unknown, where a loss or a norm is null it was inf or nan (a skipped step of fp16, say).

The file is opened for each row. A run's folder may be moved, cleaned or filled up while it trains: an open handle would
go on writing into a deleted file without a word. A row that does not fit on the disk is taken back whole, so the file
never holds half a line that a later row would run into.
"""

import contextlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megazero.files import replace_file
from megazero.observe.metrics import Value


def encode(row: Mapping[str, Value]) -> bytes:
    """One line of metrics.jsonl, newline included."""
    finite = {key: value if value is None or math.isfinite(value) else None for key, value in row.items()}
    return (json.dumps(finite, allow_nan=False) + "\n").encode("ascii")


class JsonlSink:
    """Appends rows to a file. The folder must exist."""

    def __init__(self, path: Path):
        self.path = path

    def row(self, row: Mapping[str, Value]) -> None:
        """Append one row; it is handed to the system before this returns.

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
        """Nothing is held open."""


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows of a metrics.jsonl. A torn last line (the run was killed while writing it) is left out.

    Raises:
        ValueError: a line other than the last is not JSON.
    """
    lines = path.read_bytes().split(b"\n")
    rows = [json.loads(line) for line in lines[:-1] if line]
    with contextlib.suppress(ValueError):
        rows += [json.loads(lines[-1])] if lines[-1] else []
    return rows


def drop_rows_after(path: Path, step: int) -> None:
    """Remove the rows beyond `step`, and a torn last line, in one atomic replacement: what a resumed run starts from.

    Raises:
        ValueError: a line other than the last is not JSON.
    """
    if not path.exists():
        return
    keep = b"".join(encode(row) for row in read_rows(path) if row["step"] <= step)
    replace_file(path, keep)
