"""Fit text to its reader: to the width of a terminal, or to none where no terminal would break the lines.

Tables of ours have at most 60 columns. Sentences are broken between words at the terminal's width; into a pipe or a
file they go whole, so that `grep` finds what it looks for.
"""

import shutil
import sys
import textwrap
from collections.abc import Sequence

WIDEST_TABLE = 60  # columns
_BOUNDS = 40, 120  # of a terminal: narrower ones break lines themselves, wider ones are no easier to read


def width() -> int | None:
    """Return the columns that standard output has; None: it is no terminal."""
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    least, most = _BOUNDS
    return min(max(shutil.get_terminal_size().columns, least), most)


def megabytes(size: float) -> str:
    """Return bytes in megabytes, without the unit: 1,234.5."""
    return f"{size / 1e6:,.1f}"


def in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table: the first column to the left, the others to the right, as wide as they need."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]


def fitted(text: str, columns: int | None) -> str:
    """Return a text whose lines are broken at so many columns, further in than they begin; None: nowhere."""
    if columns is None:
        return text
    found = []
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        found += wrapped(line, columns, indent) or [""]
    return "\n".join(found)


def wrapped(text: str, columns: int | None, indent: str = "") -> list[str]:
    """Return a text as lines of at most so many columns, all but the first after `indent`; None: one line."""
    if columns is None:
        return [text]
    return textwrap.wrap(text, columns, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
