"""Open the disks of a rank with the fastest number of blocks in flight; measure the speed of a disk.

Direct reads and writes are measured for several depths and block sizes. For each setting, as many bytes as a fast disk
writes in a twentieth of a second are written once and read back. This bypasses the page cache, but not the disk's own
cache: a disk's sustained speed over minutes may be lower.
"""

import math
import os
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

import torch

from megazero.base.errors import UserError
from megazero.comm.home import DiskSpeed, PagedHome
from megazero.comm.ledger import Ledger
from megazero.kernels.build import BuildError
from megazero.nvme.disk import Disk
from megazero.nvme.disk_queue import BLOCK, DEPTH, DiskQueue, aligned
from megazero.nvme.files import UnnamedFile

_MEASURED, _SECONDS = 64 << 20, 0.4  # limits of a measurement: bytes of disk and of memory, and seconds
# (blocks in flight, bytes of each); the first is the default if there is no time to measure.
SETTINGS = ((DEPTH, BLOCK), (4, 1 << 20), (32, 1 << 18), (8, 4 << 20), (1, 1 << 20))
_FIRST, _ENOUGH = 8 << 20, 0.05  # first size in bytes, and the seconds that a reliable measurement takes
_RANDOM = 1 << 20  # random bytes, repeated, so that a file system cannot compress them


def open_disk(folders: Sequence[Path], ledger: Ledger, memory: int, device: torch.device) -> tuple[PagedHome, str]:
    """Return (the rank's `Disk`, a description of its I/O for the log).

    All ranks of a host measure their first disk at the same time, as they will use it in training.

    Args:
        folders: one on each disk.
        memory: the limit in bytes of host memory for pieces in flight.

    Raises:
        UserError: 601, a folder cannot be written; 607, the transfer queue cannot be built.
    """
    depth, block, said = DEPTH, BLOCK, ""
    try:
        with suppress(OSError):  # no room, or not writable: `Disk` reports it
            found = best_speed(folders[0], _MEASURED, _SECONDS)
            depth, block = found.depth, found.block
            said = f" (read {found.read / 1e9:.2f}, written {found.write / 1e9:.2f} GB/s)"
        queue = DiskQueue(depth=depth, block=block)
    except (BuildError, OSError) as error:
        do = "run megazero doctor, which says what is missing"
        raise UserError(607, f"no transfer queue for disks: {error}", do) from None
    disks = Disk(folders, ledger, memory, queue, device)
    way = "with direct I/O" if disks.direct else "through the page cache: no direct I/O there"
    return disks, f"by {queue.engine}, {way}, {depth} blocks of {block >> 10} KiB in flight{said}"


def best_speed(folder: Path, most: int, seconds: float = math.inf) -> DiskSpeed:
    """Return the speed with the fastest setting for one write and one read.

    Args:
        most: the limit in bytes of disk and of memory.
        seconds: after this time no further setting is tried; at least one is.

    Raises:
        BuildError: the queue cannot be built.
        OSError: the folder cannot be written, or has no room.
    """
    began, found = time.perf_counter(), list[DiskSpeed]()
    with closing(UnnamedFile(folder)) as file:
        memory = _memory(file, most, min(_ENOUGH, seconds / (2 * len(SETTINGS))))
        for depth, block in SETTINGS:
            if found and time.perf_counter() - began > seconds:
                break
            with closing(DiskQueue(depth=depth, block=block)) as queue:
                write, read = (len(memory) / _seconds(queue, file, memory, write=way) for way in (True, False))
            found.append(DiskSpeed(queue.engine, file.direct, depth, block, read, write))
    return min(found, key=lambda one: 1 / one.read + 1 / one.write)


def _memory(file: UnnamedFile, most: int, enough: float) -> torch.Tensor:
    """Return at most `most` random bytes, for a write of `enough` seconds or more if possible; reserve file space."""
    size = max(min(_FIRST, most) // _RANDOM, 1) * _RANDOM
    with closing(DiskQueue()) as queue:
        while True:
            file.reserve(size)
            memory = aligned(size)
            memory.view(-1, _RANDOM)[:] = torch.frombuffer(bytearray(os.urandom(_RANDOM)), dtype=torch.uint8)
            if 2 * size > most or _seconds(queue, file, memory, write=True) >= enough:
                return memory
            size *= 2


def _seconds(queue: DiskQueue, file: UnnamedFile, memory: torch.Tensor, *, write: bool) -> float:
    began = time.perf_counter()
    (queue.write if write else queue.read)(file.handle, 0, memory).wait()
    if write and not file.direct:
        os.fdatasync(file.handle)  # else the bytes would stay in the page cache, and be read from there
        os.posix_fadvise(file.handle, 0, 0, os.POSIX_FADV_DONTNEED)
    return time.perf_counter() - began
