"""Read pieces of a file that was there when it was opened, whatever has taken its place since.

A file of token ids is never mapped (a mapped file that is truncated ends the process by SIGBUS, where a read returns an
error) and never loaded: each call reads what it is asked for. The descriptor stays open.
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
        code: of the error when it has become shorter.
        unreadable: code of the error when the system does not give it.

    Attributes:
        path: the same.
        size: its bytes when it was opened.

    Raises:
        UserError: `unreadable`, it is missing, or no regular file.
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
            UserError: `unreadable`, the disk does not give them; `code`, the file has become shorter.
        """
        found = np.empty(count, np.uint8)
        rest = found.data
        while rest:
            try:
                got = os.preadv(self._descriptor, [rest], at)
            except OSError as error:
                raise self._refused(error) from error
            if not got:
                ends = f"it ends at byte {os.fstat(self._descriptor).st_size:,}, {self._holds} lie at byte {at:,}"
                what = f"was truncated since it was opened: {ends}"
                raise UserError(self._code, what, "copy it again, and resume", where=self.path)
            rest, at = rest[got:], at + got
        return found

    def mapped(self) -> bytes | mmap.mmap:
        """Return all of it, mapped: only for what is not shortened while it is in use."""
        return mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ) if self.size else b""

    def _refused(self, error: OSError) -> UserError:
        do = "check the path, its permissions, the disk, and `ulimit -n` for many shards"
        return UserError(self._unreadable, f"cannot be read: {error.strerror}", do, where=error.filename or self.path)
