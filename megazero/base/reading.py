"""Read untrusted files: check kind and size before using the content.

A given path may be a FIFO that blocks for ever, a device, a folder, or a file of 100 GB. `read_file` reads only regular
files of at most a given size; `parse_json` raises one type of error for any invalid JSON text. Both are for small files
(manifests, locks, configurations); code that reads a file in pieces opens it with `open_regular`.
"""

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

MIB = 1 << 20
_MOST_FOLDER = 80  # characters of a folder in an error, which has 300 in all
_KINDS = {"p": "a FIFO", "s": "a socket", "c": "a device", "b": "a device", "d": "a folder"}  # as `ls -l` shows them


class UnexpectedFileError(OSError):
    """An error for a file of an unexpected kind or size; `strerror` describes it, as in any OSError."""

    def __init__(self, what: str, path: Path):
        super().__init__(0, what, str(path))


@contextmanager
def open_regular(path: Path, *, follow: bool = True) -> Iterator[int]:
    """Open a regular file for reading and yield its descriptor.

    Args:
        follow: whether the last part of the path may be a symbolic link.

    Raises:
        UnexpectedFileError: it is not a regular file.
        OSError: it cannot be opened.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno != errno.ELOOP or follow:
            raise
        raise UnexpectedFileError("expected a regular file, got a symbolic link", path) from None
    try:
        kind = stat.filemode(os.fstat(descriptor).st_mode)[0]
        if kind != "-":
            raise UnexpectedFileError(f"expected a regular file, got {_KINDS.get(kind, 'something else')}", path)
        yield descriptor
    finally:
        os.close(descriptor)


def read_file(path: Path, limit: int, *, follow: bool = True) -> bytes:
    """Return the content of a regular file of at most `limit` bytes.

    Args:
        follow: whether the last part of the path may be a symbolic link.

    Raises:
        UnexpectedFileError: it is not a regular file, or is larger than `limit`.
        OSError: it cannot be opened or read.
    """
    with open_regular(path, follow=follow) as descriptor, open(descriptor, "rb", closefd=False) as file:
        size = os.fstat(descriptor).st_size  # 0 for files in /proc
        content = file.read(min(size or limit, limit) + 1)
        if len(content) > limit:
            raise UnexpectedFileError(f"expected at most {limit:,} bytes, got {max(size, len(content)):,}", path)
    return content


def exists(path: Path) -> bool:
    """Return True if a path exists; False also for an invalid name and for one without access permission."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def looked_up(path: str | Path) -> str:
    """Return an error-message suffix that names the folder a relative path starts from; "" for an absolute path."""
    try:
        folder = "" if Path(path).is_absolute() else os.getcwd()
    except OSError:  # the current folder was deleted
        return ""
    if len(folder) > _MOST_FOLDER:
        folder = f"…{folder[-_MOST_FOLDER:]}"
    return f" (relative to the current folder, {folder})" if folder else ""


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: the text is not JSON, nests too deeply, is not UTF-8, has numbers of thousands of digits, or has
            NaN or Infinity, which Python's parser would accept.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("not JSON: nested too deeply") from None
    except ValueError as error:  # UnicodeDecodeError is one
        raise ValueError(f"not JSON: {error}") from None


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Return the value of a JSON text, which must be an object. Raises ValueError, as `parse_json` does."""
    found = parse_json(text)
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object, got {type(found).__name__}")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
