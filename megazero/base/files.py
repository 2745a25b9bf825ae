"""Files that appear whole or not at all.

A file is written under a unique temporary name beside its target, flushed to the disk, and renamed: readers meet the
old content or the new, never half of it, whatever kills the writer, a power cut included. The name carries a random
part, so that two writers never share a temporary file, and is opened exclusively with the user's own permissions
(umask).
"""

import errno
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


def temporary_name(path: Path) -> Path:
    """A unique name in the folder of `path`, so that the rename to it stays on one file system."""
    return path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:12]}")


def replace_file(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Write a whole file in one atomic replacement. Raises OSError, and leaves nothing behind then.

    Args:
        content: the bytes, or parts of them one after the other.
    """
    announce_file(path, content)
    flush_folder(path.parent)


def announce_file(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Write a file that appears whole, as the last thing done in its folder. Raises OSError.

    Whoever sees it may rename or remove the folder at once; its name is on the disk when they have flushed the folder.
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
    """Give a folder to fill, which becomes `target` when all went well; otherwise nothing is left, nor its parents.

    Raises:
        FileExistsError: the target exists.
        OSError: the disk does not take it.
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
            with suppress(OSError):  # somebody else has put something there
                folder.rmdir()
        raise


def flush(file: BinaryIO) -> None:
    """Everything written so far is on the disk when this returns."""
    file.flush()
    os.fsync(file.fileno())


def flush_file(path: Path) -> None:
    """The content of a file written by somebody else is on the disk when this returns."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Makes the renames in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
