"""Open unnamed files on local disks, with their space reserved in advance.

Neither other processes nor a later run can find an unnamed file, and the system frees it when the process ends, in any
way: so nothing is left behind, and no old file is taken for state. Space is reserved before training, so that a disk is
never full in the middle of an update.
"""

import fcntl
import os
import tempfile
from pathlib import Path


class UnnamedFile:
    """A new unnamed file on the disk of a folder.

    Attributes:
        handle: its file descriptor.
        folder: a folder on the same disk.
        direct: True if I/O bypasses the page cache; False if the file system has no direct I/O.

    Raises:
        OSError: the folder cannot be written.
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
        """Reserve `size` bytes of disk space for the file. Raises OSError if there is no room."""
        if size:
            os.posix_fallocate(self.handle, 0, size)

    def close(self) -> None:
        """Close the file, which frees its space."""
        os.close(self.handle)
