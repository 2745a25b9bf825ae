"""Read pieces of a file that was opened, even if another file has taken its place since.

A file of token ids is never memory-mapped (if a mapped file is truncated, SIGBUS ends the process, where a read returns
an error) and never loaded as a whole: each call reads only the bytes it returns. The descriptor stays open.
"""

import mmap
import os
import weakref
from pathlib import Path

import numpy as np

from megazero.base.errors import UserError
from megazero.base.reading import open_regular


class DataFile:
    """A regular file that is read in pieces.

    Args:
        path: the file.
        holds: its content, for messages: "tokens".
        code: the code of the error if the file has become shorter.
        unreadable: the code of the error if the file cannot be read.

    Attributes:
        path: the file.
        size: its size in bytes when it was opened.

    Raises:
        UserError: `unreadable`, the file is missing, or not a regular file.
    """

    def __init__(self, path: Path, holds: str, code: int, unreadable: int = 201):
        self.path, self._holds, self._code, self._unreadable = path, holds, code, unreadable
        try:
            with open_regular(path) as descriptor:
                self.size, self._descriptor = os.fstat(descriptor).st_size, os.dup(descriptor)
        except OSError as error:
            raise self._refused(error) from error
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, at: int, count: int) -> np.ndarray:
        """Return `count` bytes from `at` on, uint8.

        Raises:
            UserError: `unreadable`, the bytes cannot be read; `code`, the file has become shorter.
        """
        found = np.empty(count, np.uint8)
        rest = found.data
        while rest:
            try:
                got = os.preadv(self._descriptor, [rest], at)
            except OSError as error:
                raise self._refused(error) from error
            if not got:
                ends = f"it ends at byte {os.fstat(self._descriptor).st_size:,}, expected {self._holds} at byte {at:,}"
                what = f"was truncated after it was opened: {ends}"
                raise UserError(self._code, what, "copy it again, and resume", where=self.path)
            rest, at = rest[got:], at + got
        return found

    def mapped(self) -> bytes | mmap.mmap:
        """Return the whole file, memory-mapped: only for a file that is not truncated while it is in use."""
        return mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ) if self.size else b""

    def _refused(self, error: OSError) -> UserError:
        do = "check the path, its permissions, the disk and, with many shards, `ulimit -n`"
        return UserError(self._unreadable, f"cannot be read: {error.strerror}", do, where=error.filename or self.path)
