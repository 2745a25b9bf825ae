"""Wrap text to the width of the terminal; leave it unwrapped when the output is not a terminal.

Tables have at most 60 columns. Sentences are broken between words at the terminal's width; in a pipe or a file they
stay on one line, so that `grep` finds them.
"""

import shutil
import sys
import textwrap
from collections.abc import Sequence

WIDEST_TABLE = 60  # columns
_BOUNDS = 40, 120  # columns to wrap at: narrower terminals break lines themselves, longer lines are hard to read


def width() -> int | None:
    """Return the width of standard output in columns, within `_BOUNDS`; None if it is not a terminal."""
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    least, most = _BOUNDS
    return min(max(shutil.get_terminal_size().columns, least), most)


def megabytes(size: float) -> str:
    """Return bytes as text in megabytes, without the unit: 1,234.5."""
    return f"{size / 1e6:,.1f}"


def in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table: the first column left-aligned, the others right-aligned, each as wide as needed."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]


def fitted(text: str, columns: int | None) -> str:
    """Return a text with lines wrapped at `columns`, continuation lines indented by 4 more; columns None: as it is."""
    if columns is None:
        return text
    found = []
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        found += wrapped(line, columns, indent) or [""]
    return "\n".join(found)


def wrapped(text: str, columns: int | None, indent: str = "") -> list[str]:
    """Return a text as lines of at most `columns`, all but the first indented by `indent`; columns None: one line."""
    if columns is None:
        return [text]
    return textwrap.wrap(text, columns, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
