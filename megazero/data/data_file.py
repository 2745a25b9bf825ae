"""Read pieces of a file that was there when it was opened, and nothing that has taken its place since.

A file of token ids or document offsets is never mapped (a mapped file that is truncated ends the process by SIGBUS,
where a read returns an error) and never loaded: what is asked for is read. Its descriptor stays open, so that what
replaces the file later is another file. A set of thousands of files shares a limited number of descriptors instead
(`Descriptors`); then a file that was replaced in between is refused.
"""

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megazero.base.errors import UserError
from megazero.base.reading import open_regular


class FileIdentity(NamedTuple):
    """The numbers by which the system tells whether a file is the one that it was."""

    size: int
    modified_ns: int
    inode: int

    @classmethod
    def of(cls, descriptor: int) -> "FileIdentity":
        """Return the identity of an open file."""
        status = os.fstat(descriptor)
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)


class Descriptors:
    """A limited number of open descriptors for any number of files; those used last stay open.

    Threads may share it: a descriptor is not closed while one reads from it.

    Args:
        most: returns the limit as it is now.
    """

    def __init__(self, most: Callable[[], int]):
        self._most, self._lock = most, threading.Lock()
        self._open: OrderedDict[tuple[Path, FileIdentity], int] = OrderedDict()
        weakref.finalize(self, _close_all, self._open)

    def read_into(self, file: "DataFile", rest: memoryview, at: int) -> int:
        """Read bytes of a file from `at` on; return how many came. Raises OSError; UserError: it was replaced."""
        key = file.path, file.identity
        with self._lock:
            descriptor = self._open.pop(key, None)
            if descriptor is None:
                while len(self._open) >= self._most():
                    os.close(self._open.popitem(last=False)[1])
                with open_regular(file.path) as found:
                    file.require_same(FileIdentity.of(found))
                    descriptor = os.dup(found)
            self._open[key] = descriptor
            return os.preadv(descriptor, [rest], at)


def _close_all(descriptors: OrderedDict[tuple[Path, FileIdentity], int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])


class DataFile:
    """A regular file that is read in pieces.

    Args:
        path: the file.
        holds: what is in it, for messages: "tokens".
        code: of the error when it has become shorter.
        descriptors: shared by many files; None: this one keeps its own.
        unreadable: code of the error when the system does not give it.

    Attributes:
        path: the same.
        identity: of the file that was opened.

    Raises:
        UserError: `unreadable`, it is missing, or no regular file.
    """

    def __init__(
        self, path: Path, holds: str, code: int, descriptors: Descriptors | None = None, unreadable: int = 201
    ):
        self.path, self._holds, self._code, self._descriptors = path, holds, code, descriptors
        self._unreadable = unreadable
        try:
            with open_regular(path) as descriptor:
                self.identity = FileIdentity.of(descriptor)
                if descriptors is None:
                    self._own = os.dup(descriptor)
                    weakref.finalize(self, os.close, self._own)
        except OSError as error:
            what, where = f"cannot be read: {error.strerror}", error.filename or path
            raise UserError(unreadable, what, "give token files that can be read", where=where) from error

    @property
    def size(self) -> int:
        """Return its bytes when it was opened."""
        return self.identity.size

    def read(self, at: int, count: int) -> np.ndarray:
        """Return `count` bytes from `at` on, uint8.

        Raises:
            UserError: `unreadable`, the disk does not give them; `code`, it has become shorter, or was replaced.
        """
        found = np.empty(count, np.uint8)
        rest = found.data
        while rest:
            try:
                if self._descriptors is None:
                    got = os.preadv(self._own, [rest], at)
                else:
                    got = self._descriptors.read_into(self, rest, at)
            except OSError as error:
                what = f"cannot be read: {error.strerror}"
                raise UserError(self._unreadable, what, "mend the disk", where=self.path) from error
            if not got:
                ends = f"it ends at byte {self._size_now():,}, {self._holds} lie at byte {at:,}"
                what = f"was truncated since it was opened: {ends}"
                raise UserError(self._code, what, "copy it again, and resume", where=self.path)
            rest, at = rest[got:], at + got
        return found

    def array(self, dtype: np.dtype | str, at: int, first: int, stop: int) -> np.ndarray:
        """Return elements [first, stop) of an array of this type that begins at byte `at`. Raises as `read`."""
        kind = np.dtype(dtype)
        return self.read(at + first * kind.itemsize, (stop - first) * kind.itemsize).view(kind)

    def require_same(self, found: FileIdentity) -> None:
        """Refuse a file that is not the one that was opened. Raises UserError of `code`."""
        if found != self.identity:
            what = f"was replaced since it was opened: expected {self.size:,} bytes of then, got {found.size:,} of now"
            raise UserError(self._code, what, "leave files that a run reads as they are, and resume", where=self.path)

    def _size_now(self) -> int:
        if self._descriptors is None:
            return os.fstat(self._own).st_size
        try:
            return self.path.stat().st_size
        except OSError:  # it is gone as well
            return 0
