"""Open the disks of a rank, with as many blocks in flight as serve them best; say how fast a disk is."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from megazero.base.errors import UserError
from megazero.comm.home import DiskSpeed, PagedHome
from megazero.comm.ledger import Ledger

_MEASURED, _SECONDS = 64 << 20, 0.4  # bytes of disk and memory at most, and time, to find how many blocks are best


def open_disk(folders: Sequence[Path], ledger: Ledger, memory: int, device: torch.device) -> tuple[PagedHome, str]:
    """Return the home of a rank on disks, and how it reads and writes them, in words.

    All ranks of a host measure their first disk at once, as they will read and write.

    Args:
        folders: one on each disk.
        memory: most bytes of the host for pieces that are on their way.

    Raises:
        UserError: 601, a folder cannot be written; 607, no queue of transfers can be built.
    """
    from megazero.kernels.build import BuildError
    from megazero.nvme import measure
    from megazero.nvme.disk import Disk
    from megazero.nvme.disk_queue import BLOCK, DEPTH, DiskQueue

    depth, block, said = DEPTH, BLOCK, ""
    try:
        with suppress(OSError):  # no room, or nothing can be written: opening it says so
            found = measure.best_speed(folders[0], _MEASURED, _SECONDS)
            depth, block = found.depth, found.block
            said = f" (read {found.read / 1e9:.2f}, written {found.write / 1e9:.2f} GB/s)"
        queue = DiskQueue(depth=depth, block=block)
    except (BuildError, OSError) as error:
        do = "run megazero doctor, which says what is missing"
        raise UserError(607, f"no queue of transfers to disks: {error}", do) from None
    disks = Disk(folders, ledger, memory, queue, device)
    way = "past the system's cache" if disks.direct else "through the system's cache: no direct I/O there"
    return disks, f"by {queue.engine}, {way}, {depth} blocks of {block >> 10} KiB in flight{said}"


def speed_of(folder: Path, most: int) -> DiskSpeed:
    """Return how fast a disk is read and written.

    Args:
        most: bytes to take of the disk, and of memory.

    Raises:
        BuildError: the queue cannot be built.
        OSError: the folder cannot be written, or has no room.
    """
    from megazero.nvme import measure

    return measure.best_speed(folder, most)
