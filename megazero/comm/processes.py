"""Identify processes of this host by number and start time, because the system uses a number again.

The numbers mean other processes on another host, or in another PID namespace (a container's): `host_id` tells.
"""

import hashlib
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_STARTED, _STATE = 19, 0  # fields of /proc/PID/stat behind the name


@dataclass(frozen=True)
class Process:
    """A process of this host.

    Attributes:
        started: in the kernel's ticks since the host's start.
    """

    pid: int
    started: int

    @classmethod
    def own(cls) -> "Process":
        """Return this process; its start is 0 where the system does not report it."""
        fields = _stat(os.getpid())
        return cls(os.getpid(), int(fields[_STARTED]) if fields else 0)

    @property
    def state(self) -> str:
        """Return the kernel's letter: R, S, D, T (stopped), t (traced), Z (dead, not reaped); "": it is gone."""
        fields = _stat(self.pid)
        return fields[_STATE] if fields and int(fields[_STARTED]) == self.started else ""

    @property
    def is_stopped(self) -> bool:
        """True if the process is stopped by a signal or a debugger."""
        return self.state in ("T", "t")


@cache
def host_id() -> int:
    """Return a number of 64 bits that is equal for processes that can see each other and share memory.

    These have one machine and boot, user and namespaces. Host names are not enough: containers of one machine have
    several, and many machines may be called localhost. Where the system does not report it, the number is random.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        names = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "user", "mnt")]
    except OSError:
        return int.from_bytes(os.urandom(8))
    return int.from_bytes(hashlib.sha256(" ".join([boot, str(os.getuid()), *names]).encode()).digest()[:8])


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat behind the name, which may hold anything; none: no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
