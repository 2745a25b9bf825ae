"""Examine the machine without its accelerators: system, processor, memory, limits of the job, disks.

Imports no torch.
"""

import os
import platform
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megazero.base.files import write_all
from megazero.base.machine import cgroup_limits, file_system_of, free_memory, known_memory, num_cores
from megazero.tools.doctor.finding import Finding, amount

_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "asimd", "sve", "bf16")
_BLOCK, _MOST = 1 << 20, 64 << 20  # fewest and most bytes that are written to a disk
_QUIET = 0.25  # processes per core that do not disturb a measurement
_LITTLE = 2 << 30  # free bytes of a disk, below which the line warns


def system() -> Iterator[Finding]:
    """Yield the operating system and Python."""
    yield Finding("system", f"{platform.system()} {platform.release()}, {platform.machine()}")
    yield Finding("python", f"{platform.python_version()} ({platform.python_implementation()})")


def processor() -> Iterator[Finding]:
    """Yield the processor's name, its usable cores, and the vector instructions that kernels use."""
    cores, flags = num_cores(), (_cpuinfo("flags") or _cpuinfo("Features")).split()
    features = ", ".join(feature for feature in _FEATURES if feature in flags) or "no known vector extension"
    text = f"{processor_name()}, {cores} of {os.cpu_count()} cores usable; {features}"
    yield Finding("processor", text, values={"cores": cores})


def processor_name() -> str:
    """Return the processor's name."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def load() -> Iterator[Finding]:
    """Yield the load of other processes; call it before anything is measured."""
    others, cores = os.getloadavg()[0], num_cores()
    text = f"{others:.1f} processes ran in the last minute, on {cores} cores"
    busy = Finding("load", f"busy: {text}; measured speeds are too low", "unknown", values={"busy": others / cores})
    yield busy if others > _QUIET * cores else Finding("load", text)


def memory() -> Iterator[Finding]:
    """Yield the host's memory, in bytes."""
    known, free = known_memory(Path("/proc"))["MemTotal"], free_memory()
    values = {"total_bytes": known, "free_bytes": free}
    yield Finding("memory", f"{amount(known, 'B')}, {amount(free, 'B')} free", values=values)


def limits() -> Iterator[Finding]:
    """Yield the limits of the job (cgroups), and of each of its processes (ulimit -v)."""
    quota, limit = cgroup_limits(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    words = [f"{quota:.3g} cores"] if quota else []
    words += [amount(limit, "B") + " of memory (cgroup)"] if limit else []
    values = {name: value for name, value in (("cores", quota), ("memory_bytes", limit)) if value}
    if space != resource.RLIM_INFINITY:
        words.append(f"{amount(space, 'B')} of address space for each process (ulimit -v)")
        values["address_space_bytes"] = space
    yield Finding("limits", ", ".join(words) or "none", values=values)


def disk(folder: Path) -> Iterator[Finding]:
    """Yield the free space where runs are written, and a line if nothing can be written there."""
    place = _nearest(folder)
    free = shutil.disk_usage(place).free
    little = "a checkpoint takes 12 bytes or more for each parameter" if free < _LITTLE else ""
    text = f"{amount(free, 'B')} free ({file_system_of(place)})"
    yield Finding(f"room in {folder}", text, "absent" if little else "there", little, {"free_bytes": free})
    try:
        with tempfile.TemporaryFile(dir=place, buffering=0) as file:
            write_all(file, bytes(_BLOCK))
    except OSError as error:
        reason = error.strerror or str(error)
        yield Finding(f"disk of {folder}", f"cannot be written: {reason}", "missing", "choose another --run")


def direct(folder: Path) -> Iterator[Finding]:
    """Yield the rates at which a disk is read and written by direct I/O, as offloaded state would be."""
    from megazero.extensions.homes import HOMES
    from megazero.kernels.build import BuildError

    place = _nearest(folder)
    for home in HOMES.values():
        try:
            found = home.speed(place, max(min(_MOST, shutil.disk_usage(place).free // 4), _BLOCK))
        except (OSError, BuildError) as error:
            yield Finding(f"direct I/O of {folder}", str(error), "unknown")
            continue
        text = f"read {amount(found.read, 'B/s')}, write {amount(found.write, 'B/s')}"
        text += f" ({found.engine}, {found.depth} blocks of {found.block >> 10} KiB in flight)"
        text += "" if found.direct else "; the file system has no direct I/O"
        values = {"read_bandwidth": found.read, "write_bandwidth": found.write}
        yield Finding(f"direct I/O of {folder}", text, values={**values, "depth": found.depth, "block": found.block})


def _nearest(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())


def _cpuinfo(field: str) -> str:
    """Return a field of the first processor in /proc/cpuinfo; "": there is none."""
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text().splitlines() if listing.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")
