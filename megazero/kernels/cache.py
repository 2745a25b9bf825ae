"""Tell whole libraries of the kernel cache from torn ones, before one is executed.

The SHA-256 of a library's content is next to it. A library that was cut off, by a full disk or an unfinished copy,
would otherwise end the process by SIGBUS when it is mapped.
"""

import hashlib
from pathlib import Path

from megazero.base.files import flush_file, replace_file


def seal(unfinished: Path, library: Path) -> None:
    """Give a finished library its name, with the hash of its content next to it. Raises OSError.

    The hash comes first: a process that is killed in between leaves no hash that fits, and the library is built again.
    """
    flush_file(unfinished)
    replace_file(_seal_of(library), _digest(unfinished))
    unfinished.replace(library)


def is_sealed(library: Path) -> bool:
    """Return True if a library has the content that was sealed."""
    try:
        return _seal_of(library).read_bytes() == _digest(library)
    except OSError:
        return False


def _seal_of(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest().encode()
