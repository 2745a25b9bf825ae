"""Share memory without a name between processes of one host: a file descriptor that others open through /proc.

It is gone with the last process that has it. A reader checks that it opens the memory that was announced, because a
descriptor's number may be used again.
"""

import errno
import mmap
import os
from typing import NamedTuple


class Handle(NamedTuple):
    """The location of some memory: a file descriptor of a process, and which file that is.

    Attributes:
        number: of the descriptor.
        device, inode: of the memory.
    """

    pid: int
    number: int
    device: int
    inode: int


def make(name: str, size: int) -> tuple[mmap.mmap, Handle]:
    """Make memory of `size` bytes, zero at first. Raises OSError."""
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, "this system has no memory without a name")
    number = os.memfd_create(name)
    os.ftruncate(number, size)
    found = os.fstat(number)
    return mmap.mmap(number, size), Handle(os.getpid(), number, found.st_dev, found.st_ino)


def attach(handle: Handle, size: int) -> mmap.mmap:
    """Map another process' memory. Raises OSError: that is not allowed, or it is not the memory of that handle."""
    theirs = os.open(f"/proc/{handle.pid}/fd/{handle.number}", os.O_RDWR | os.O_NONBLOCK)
    try:
        found = os.fstat(theirs)
        if (found.st_dev, found.st_ino, found.st_size) != (handle.device, handle.inode, size):
            raise OSError(errno.EPERM, "the descriptor is something else")
        return mmap.mmap(theirs, size)
    finally:
        os.close(theirs)
