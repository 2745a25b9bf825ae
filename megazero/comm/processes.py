"""Inspect processes of this host by their PID.

A PID is valid only on one host and in one PID namespace (a container has its own): compare `host_id`.
"""

import hashlib
import os
from functools import cache
from pathlib import Path


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal or a debugger; False if the system does not report it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()  # after the name
    except OSError:
        return False
    return fields[0] in ("T", "t")


@cache
def host_id() -> int:
    """Return a 64-bit number that is equal for processes that can see each other and share memory.

    Such processes have the machine and its boot, the user, and the namespaces in common. Host names are not enough:
    containers of one machine have several, and many machines may be called localhost. If the system does not report
    these facts, the number is random.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        names = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "user", "mnt")]
    except OSError:
        return int.from_bytes(os.urandom(8))
    return int.from_bytes(hashlib.sha256(" ".join([boot, str(os.getuid()), *names]).encode()).digest()[:8])
