"""Open files without a name, on disks of this machine, whose bytes are there before they are needed.

A file without a name cannot be found by others nor by a later run, and the system frees it when the process ends,
however it ends: so nothing is left behind, and nothing left behind is taken for state. Its bytes are reserved when it
grows, before training: a disk is never full in the middle of an update.
"""

import errno
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megazero.base.errors import UserError

_DIRECT = getattr(os, "O_DIRECT", 0)


@dataclass(frozen=True, eq=False)
class UnnamedFile:
    """An open file without a name.

    Attributes:
        handle: its descriptor.
        folder: on whose disk it is.
        direct: its bytes do not go through the system's cache.
    """

    handle: int
    folder: Path
    direct: bool

    def reserve(self, size: int) -> None:
        """Let the file have `size` bytes that are its own. Raises OSError: there is no room for them."""
        if size:
            os.posix_fallocate(self.handle, 0, size)

    def close(self) -> None:
        os.close(self.handle)


def open_unnamed(folder: Path) -> UnnamedFile:
    """Return a new file without a name on the disk of a folder, for direct I/O where its file system has that.

    Raises:
        OSError: nothing can be written there.
    """
    for direct in (True, False) if _DIRECT else (False,):
        try:
            return UnnamedFile(_open(folder, _DIRECT if direct else 0), folder, direct)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:  # which a file system says that has no direct I/O
                raise
    raise AssertionError("the last way returns or raises")


def open_all(folders: Sequence[Path]) -> list[UnnamedFile]:
    """Return a new file without a name in each folder. Raises UserError: 601, nothing can be written in one."""
    files: list[UnnamedFile] = []
    try:
        for folder in folders:
            files.append(open_unnamed(folder))
    except OSError as error:
        for file in files:
            file.close()
        what = f"nothing can be written there: {error.strerror}"
        raise UserError(601, what, "give another zero.offload.path", where=folder) from None
    return files


def _open(folder: Path, flags: int) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT) or not folder.is_dir():
            raise
    handle, name = tempfile.mkstemp(dir=folder)  # a file system that has only files with names
    os.unlink(name)
    try:
        return os.open(f"/proc/self/fd/{handle}", os.O_RDWR | os.O_CLOEXEC | flags)
    finally:
        os.close(handle)
