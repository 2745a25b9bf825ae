"""Read the cores, memory and file systems of this machine, and the limits of this job. Imports no torch."""

import ctypes
import os
import sys
from pathlib import Path

_M_MMAP_THRESHOLD = -3  # from glibc's malloc.h


def job_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of memory that this job may use: the machine's total, or less if its cgroups limit it."""
    _, limit = cgroup_limits(proc / "self/cgroup", cgroups)
    return min(known_memory(proc)["MemTotal"], limit or sys.maxsize)


def cgroup_limits(listing: Path, root: Path) -> tuple[float | None, int | None]:
    """Return the least (cores, bytes) limits of the cgroup v2 in file `listing` and its parents; None: no limit.

    `root` is the folder where cgroups are mounted.
    """
    lines = listing.read_text().splitlines() if listing.exists() else []
    quotas: list[float] = []
    limits: list[int] = []
    for path in (Path(line.removeprefix("0::")) for line in lines if line.startswith("0::")):
        for folder in (root / above.relative_to("/") for above in (path, *path.parents)):
            quota, limit = _words(folder / "cpu.max"), _words(folder / "memory.max")
            quotas += [int(quota[0]) / int(quota[1])] if len(quota) == 2 and quota[0].isdecimal() else []
            limits += [int(limit[0])] if limit and limit[0].isdecimal() else []
    return min(quotas, default=None), min(limits, default=None)


def free_memory() -> int:
    """Return the bytes that can be allocated without swapping; half of all memory if the system does not report it."""
    known = known_memory(Path("/proc"))
    return min(known.get("MemAvailable", known["MemTotal"] // 2), job_memory())


def known_memory(proc: Path) -> dict[str, int]:
    """Return MemTotal and, if the system reports it, MemAvailable, in bytes."""
    listing = proc / "meminfo"
    rows = [line.split() for line in listing.read_text().splitlines()] if listing.exists() else []
    known = {row[0].rstrip(":"): int(row[1]) << 10 for row in rows if row[0] in ("MemTotal:", "MemAvailable:")}
    return known if "MemTotal" in known else {"MemTotal": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")}


def file_system_of(place: Path) -> str:
    """Return the type of a folder's file system, which shows whether it is a shared or an in-memory one."""
    listing = Path("/proc/mounts")
    rows = [line.split() for line in listing.read_text().splitlines()] if listing.exists() else []
    holding = [row for row in rows if place.resolve().is_relative_to(row[1])]
    return max(reversed(holding), key=lambda row: len(row[1]))[2] if holding else "unknown file system"


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _words(file: Path) -> list[str]:
    return file.read_text().split() if file.is_file() else []


def return_freed_memory() -> None:
    """From now on return blocks of 128 KiB or more to the system as soon as they are freed.

    glibc keeps freed blocks of up to 32 MiB in its heaps, where blocks of other sizes may not fit the gaps. This
    matters if states are larger than memory: for four ranks with 96 million parameters each on disks, a rank's memory
    drops from 960 MB to 570 MB. (glibc's M_MMAP_THRESHOLD; without it nothing is done.)
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 17)
