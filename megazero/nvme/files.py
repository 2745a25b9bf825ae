"""Open files without a name, on disks of this machine, whose bytes are there before they are needed.

A file without a name cannot be found by others nor by a later run, and the system frees it when the process ends,
however it ends: so nothing is left behind, and nothing left behind is taken for state. Its bytes are reserved when it
grows, before training: a disk is never full in the middle of an update.
"""

import errno
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

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
