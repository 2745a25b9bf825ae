"""Measure direct reads and writes of a disk, by blocks in flight and their size.

Each setting writes as many bytes as a fast disk takes in a twentieth of a second, once, and reads them again. They
bypass the system's cache, but not the disk's own: what a disk keeps up for minutes may be less.
"""

import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from megazero.nvme.disk_queue import BLOCK, DEPTH, DiskQueue, Engine, aligned
from megazero.nvme.files import UnnamedFile, open_unnamed

# Blocks in flight, and bytes of each; first the one to take where there is no time to measure.
SETTINGS = ((DEPTH, BLOCK), (4, 1 << 20), (32, 1 << 18), (8, 4 << 20), (1, 1 << 20))
_FIRST, _ENOUGH = 8 << 20, 0.05  # bytes, and the seconds that they must take to be believed
_RANDOM = 1 << 20  # bytes, again and again: nothing that a file system could compress


@dataclass(frozen=True)
class DiskSpeed:
    """The speed that one setting reaches.

    Attributes:
        engine: how the system was asked.
        direct: the system's cache was left out.
        depth, block: blocks in flight, and bytes of each.
        read, write: bytes/s.
    """

    engine: Engine
    direct: bool
    depth: int
    block: int
    read: float
    write: float

    @property
    def seconds(self) -> float:
        """Return the seconds of a byte that is read and written back."""
        return 1 / self.read + 1 / self.write


def speeds(folder: Path, most: int, seconds: float = math.inf) -> Iterator[DiskSpeed]:
    """Yield the speed of each setting, of one at least.

    Args:
        most: bytes to take of the disk, and of memory.
        seconds: behind which no more settings are tried.

    Raises:
        BuildError: the queue cannot be built.
        OSError: the folder cannot be written, or has no room.
    """
    file, began = open_unnamed(folder), time.perf_counter()
    try:
        size, memory = _size(file, most, min(_ENOUGH, seconds / (2 * len(SETTINGS))))
        for number, (depth, block) in enumerate(SETTINGS):
            if number and time.perf_counter() - began > seconds:
                return
            queue = DiskQueue(depth=depth, block=block)
            try:
                write = _seconds(queue, file, memory, write=True)
                read = _seconds(queue, file, memory, write=False)
            finally:
                queue.close()
            yield DiskSpeed(queue.engine, file.direct, depth, block, size / read, size / write)
    finally:
        file.close()


def best_speed(folder: Path, most: int, seconds: float = math.inf) -> DiskSpeed:
    """Return the speed of the setting with which bytes are read and written back soonest; see `speeds`."""
    return min(speeds(folder, most, seconds), key=lambda one: one.seconds)


def _size(file: UnnamedFile, most: int, enough: float) -> tuple[int, torch.Tensor]:
    """Return how many bytes take `enough` seconds to be believed, and so much memory; they are the file's then."""
    size, queue = max(min(_FIRST, most) // _RANDOM, 1) * _RANDOM, DiskQueue()
    try:
        while True:
            file.reserve(size)
            memory = aligned(size)
            memory.view(-1, _RANDOM)[:] = torch.frombuffer(bytearray(os.urandom(_RANDOM)), dtype=torch.uint8)
            if 2 * size > most or _seconds(queue, file, memory, write=True) >= enough:
                return size, memory
            size *= 2
    finally:
        queue.close()


def _seconds(queue: DiskQueue, file: UnnamedFile, memory: torch.Tensor, *, write: bool) -> float:
    began = time.perf_counter()
    (queue.write if write else queue.read)(file.handle, 0, memory).wait()
    if write and not file.direct:
        os.fdatasync(file.handle)  # the bytes would be in the cache, and come from there again
        os.posix_fadvise(file.handle, 0, 0, os.POSIX_FADV_DONTNEED)
    return time.perf_counter() - began
