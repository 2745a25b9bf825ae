"""Share memory without a name between processes of one host: a file descriptor that others open through /proc.

It is gone with the last process that has it. A process opens another's only if it is proven to be what was announced:
memory of the same user, of that inode and size, which is sealed. (Memory cut off under a reader would end it with
SIGBUS.)
"""

import errno
import fcntl
import mmap
import os
import stat
import sys
from dataclasses import dataclass

_SEALS = 0 if sys.platform != "linux" else fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True)
class Handle:
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
    number = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(number, size)
    fcntl.fcntl(number, fcntl.F_ADD_SEALS, _SEALS)
    found = os.fstat(number)
    return mmap.mmap(number, size), Handle(os.getpid(), number, found.st_dev, found.st_ino)


def attach(handle: Handle, name: str, size: int) -> mmap.mmap:
    """Map another process' memory. Raises OSError: that is not allowed, or it is not what it should be."""
    path = f"/proc/{handle.pid}/fd/{handle.number}"
    if os.stat(f"/proc/{handle.pid}").st_uid != os.geteuid():
        raise _not_proven(name, "the process is another user's")
    if os.readlink(path) != f"/memfd:{name} (deleted)":
        raise _not_proven(name, "the descriptor is something else")
    _prove(name, os.stat(path), handle, size)  # before it is opened, which may do something to a device
    theirs = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _prove(name, os.fstat(theirs), handle, size)  # it may have become another one meanwhile
        if fcntl.fcntl(theirs, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise _not_proven(name, "its size can be changed")
        return mmap.mmap(theirs, size)
    finally:
        os.close(theirs)


def _prove(name: str, found: os.stat_result, handle: Handle, size: int) -> None:
    """Refuse memory that is not the memory that was announced. Raises OSError."""
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise _not_proven(name, "it is another user's, or no file")
    if (found.st_dev, found.st_ino) != (handle.device, handle.inode):
        raise _not_proven(name, "it is another file")
    if found.st_size != size:
        raise _not_proven(name, f"expected {size} bytes, got {found.st_size}")


def _not_proven(name: str, what: str) -> OSError:
    return OSError(errno.EPERM, f"not the memory {name}: {what}")
