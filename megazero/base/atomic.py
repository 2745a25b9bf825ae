"""Write small files of a data set whole or not at all; a failure is one line for the user."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megazero.base.errors import UserError
from megazero.base.files import replace_file


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise UserError 208 where the system refuses, in the context, to write `path`."""
    try:
        yield
    except OSError as error:
        what, do = f"cannot be written: {error.strerror}", "free space or choose another place"
        raise UserError(208, what, do, where=path) from error


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a small file; make its folder if it is missing. Raises UserError 208."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
