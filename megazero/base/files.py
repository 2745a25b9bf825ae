"""Write files that appear whole or not at all.

A file is written under a unique temporary name next to its target, flushed to the disk, and renamed: readers see the
old content or the new, never a part, even if the writer is killed or the power fails. The temporary name has a random
part, so two writers never share a temporary file; the file is opened exclusively, with the user's umask.
"""

import errno
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from megazero.base.errors import UserError


def temporary_name(path: Path) -> Path:
    """Return a unique name in the folder of `path`, so that the rename to it stays on one file system."""
    return path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:12]}")


def replace_file(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Replace a whole file atomically and flush its folder. Raises OSError; no temporary file is left then.

    Args:
        content: the bytes, or an iterable of consecutive parts.
    """
    announce_file(path, content)
    flush_folder(path.parent)


def announce_file(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Write a file atomically, as the last action in its folder, which is not flushed. Raises OSError.

    Another process that sees the file may rename or remove the folder at once; that process flushes the folder.
    """
    temporary = temporary_name(path)
    try:
        with temporary.open("xb") as file:
            file.writelines([content] if isinstance(content, bytes) else content)
            flush(file)
        temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a new folder that is renamed to `target` on success; on failure remove it and the parents made for it.

    Raises:
        FileExistsError: the target exists.
        OSError: the folder cannot be written.
    """
    if target.exists() or target.is_symlink():
        raise FileExistsError(errno.EEXIST, "exists already", str(target))
    missing = [folder for folder in target.parents if not folder.exists()]  # the nearest first
    staging = temporary_name(target)
    try:
        staging.mkdir(parents=True)
        yield staging
        staging.rename(target)
        flush_folder(target.parent)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        for folder in missing:
            with suppress(OSError):  # another process may have put files there
                folder.rmdir()
        raise


def write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    """Write all bytes to an unbuffered file, where one `write` may take only a part."""
    view = memoryview(data)
    while len(view):
        view = view[file.write(view) :]


def flush(file: BinaryIO) -> None:
    """Flush all bytes written so far to the disk."""
    file.flush()
    os.fsync(file.fileno())


def flush_file(path: Path) -> None:
    """Flush to the disk a file that another process or handle has written."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Make the renames in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def writing(
    path: Path, code: int = 208, do: str = "free space or choose another place", what: str = "cannot be written"
) -> Iterator[None]:
    """Turn an OSError inside the context, which writes `path`, into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(code, f"{what}: {error.strerror}", do, where=path) from error


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a small file atomically; make its folder if it is missing. Raises UserError 208."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
