"""Measure direct reads and writes of a disk, by blocks in flight and their size.

Each setting writes as many bytes as a fast disk takes in a twentieth of a second, once, and reads them again. They
bypass the system's cache, but not the disk's own: what a disk keeps up for minutes may be less.
"""

import math
import os
import time
from contextlib import closing
from pathlib import Path

import torch

from megazero.comm.home import DiskSpeed
from megazero.nvme.disk_queue import BLOCK, DEPTH, DiskQueue, aligned
from megazero.nvme.files import UnnamedFile

# Blocks in flight, and bytes of each; first the one to take where there is no time to measure.
SETTINGS = ((DEPTH, BLOCK), (4, 1 << 20), (32, 1 << 18), (8, 4 << 20), (1, 1 << 20))
_FIRST, _ENOUGH = 8 << 20, 0.05  # bytes, and the seconds that they must take to be believed
_RANDOM = 1 << 20  # bytes, again and again: nothing that a file system could compress


def best_speed(folder: Path, most: int, seconds: float = math.inf) -> DiskSpeed:
    """Return the speed of the setting with which bytes are read and written back soonest.

    Args:
        most: bytes to take of the disk, and of memory.
        seconds: behind which no more settings are tried; one always is.

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
    """Return memory for as many bytes as take `enough` seconds to be believed; they are reserved in the file."""
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
        os.fdatasync(file.handle)  # the bytes would be in the cache, and come from there again
        os.posix_fadvise(file.handle, 0, 0, os.POSIX_FADV_DONTNEED)
    return time.perf_counter() - began
