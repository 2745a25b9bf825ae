"""Hold back what libraries write to standard error past `sys.stderr`."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stderr_held(lines: list[str]) -> Iterator[None]:
    """Keep all that reaches file descriptor 2 inside the context; at its end the lines are in `lines`."""
    try:
        sys.stderr.flush()
        said = tempfile.TemporaryFile()  # noqa: SIM115 - closed below, in what may not be skipped
        real = os.dup(2)
    except (OSError, ValueError, AttributeError):  # there is no standard error, or no room for a file
        yield
        return
    with said:
        os.dup2(said.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(real, 2)
            os.close(real)
            said.seek(0)
            lines += said.read().decode(errors="replace").splitlines()
