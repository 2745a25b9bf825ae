"""Files that appear whole or not at all.

A file is written under a unique temporary name beside its target, flushed to the disk, and renamed: readers meet the
old content or the new, never half of it, whatever kills the writer. The name carries a random part, so that two
writers never share a temporary file, and is opened exclusively with the user's own permissions (umask).
"""

import os
import uuid
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from megazero.errors import UserError


def write_error(path: str | Path, error: OSError) -> UserError:
    """What a user reads when the system refuses to write `path`."""
    return UserError(208, f"cannot be written: {error.strerror}", "free space or choose another place", where=path)


def temporary_name(path: Path) -> Path:
    """A unique name in the folder of `path`, so that the rename to it stays on one file system."""
    return path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:12]}")


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces a small file; its folder is made where missing. Raises UserError 208."""
    temporary = temporary_name(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:
            file.write(content)
            flush(file)
        temporary.replace(path)
        flush_folder(path.parent)
    except OSError as error:
        raise write_error(path, error) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def flush(file: BinaryIO) -> None:
    """Everything written so far is on the disk when this returns."""
    file.flush()
    os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Makes the renames in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
