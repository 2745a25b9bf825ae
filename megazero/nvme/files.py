"""Open files without a name, on disks of this machine, whose bytes are there before they are needed.

A file without a name cannot be found by others nor by a later run, and the system frees it when the process ends,
however it ends: so nothing is left, and no old file is taken for state. Its bytes are reserved when it
grows, before training: a disk is never full in the middle of an update.
"""

import fcntl
import os
import tempfile
from pathlib import Path


class UnnamedFile:
    """A new file without a name on the disk of a folder.

    Attributes:
        handle: its descriptor.
        folder: on whose disk it is.
        direct: its bytes do not go through the system's cache, where its file system has that.

    Raises:
        OSError: nothing can be written there.
    """

    def __init__(self, folder: Path):
        self.folder, self.direct = folder, True
        with tempfile.TemporaryFile(dir=folder) as file:
            self.handle = os.dup(file.fileno())
        try:
            fcntl.fcntl(self.handle, fcntl.F_SETFL, fcntl.fcntl(self.handle, fcntl.F_GETFL) | os.O_DIRECT)
        except OSError:  # a file system without direct I/O
            self.direct = False

    def reserve(self, size: int) -> None:
        """Let the file have `size` bytes that are its own. Raises OSError: there is no room for them."""
        if size:
            os.posix_fallocate(self.handle, 0, size)

    def close(self) -> None:
        """Close the file, which frees its space."""
        os.close(self.handle)
