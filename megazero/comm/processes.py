"""Identify processes of this host by number and start time, because the system uses a number again.

A process of another user is never inspected nor signalled, nor is one of another host or of another PID namespace (a
container's), where the same numbers mean other processes.
"""

import contextlib
import hashlib
import os
import signal
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
        return self.state in ("T", "t")

    def send(self, number: int) -> bool:
        """Send a signal, if the process lives, is this user's and has a handler for it; return whether it was sent."""
        with contextlib.suppress(OSError):
            handle = os.pidfd_open(self.pid)  # from here on nobody else can get the number unnoticed
            try:
                lives = self.state not in ("", "Z", "X", "x")
                if lives and os.stat(f"/proc/{self.pid}").st_uid == os.geteuid() and _handles(self.pid, number):
                    signal.pidfd_send_signal(handle, number)
                    return True
            finally:
                os.close(handle)
        return False


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


def _handles(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return False
    return any(int(line.split()[1], 16) >> (number - 1) & 1 for line in lines if line.startswith("SigCgt:"))
