"""Write small files of a data set whole or not at all; a failure is one line for the user."""

from pathlib import Path

from megazero.base.errors import UserError
from megazero.base.files import replace_file


def write_error(path: str | Path, error: OSError) -> UserError:
    """Return the error that a user reads when the system refuses to write `path`."""
    return UserError(208, f"cannot be written: {error.strerror}", "free space or choose another place", where=path)


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a small file; make its folder if it is missing. Raises UserError 208."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
    except OSError as error:
        raise write_error(path, error) from error
