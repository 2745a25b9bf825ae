"""Count the bytes that a rank would keep on disks, read and write, without a disk.

Transfers take host memory up to `zero.offload.host_mb`; the amount depends on the disks' speed, so it is not counted.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from megazero.comm.home import WINDOW, Access, PagedHome
from megazero.comm.ledger import DISK, Ledger


class IdleDisk(PagedHome):
    """Disks whose transfers complete at once; reads return arbitrary values.

    Args:
        ledger: counts the bytes, as for `nvme/disk.py`.
    """

    window = WINDOW

    def __init__(self, ledger: Ledger):
        self._ledger = ledger
        self._windows: dict[torch.dtype, Tensor] = {}  # buffers of the update; not part of a step's own memory

    def zeros(self, numel: int, dtype: torch.dtype, category: str) -> Tensor:
        """Return a tensor on the disk; only its size is kept."""
        self._ledger.hold(f"nvme_{category}", numel * dtype.itemsize)
        self._windows.setdefault(dtype, torch.empty(self.window, dtype=dtype))
        return torch.empty(numel, dtype=dtype, device="meta")

    def send(self, x: Tensor, into: Tensor, purpose: str) -> None:
        """Count the bytes that are written to the disk."""
        self._ledger.add(DISK, f"{purpose} out", x.numel(), x.element_size())

    def start_bring(self, x: Tensor, into: Tensor, purpose: str) -> Future[None]:
        """Count the bytes that are read from the disk; return a completed future."""
        self._ledger.add(DISK, f"{purpose} back", x.numel(), x.element_size())
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def windows(
        self, flats: Sequence[tuple[Tensor, Access]], purpose: str, skip: Tensor | None = None
    ) -> Iterator[tuple[slice, list[Tensor]]]:
        """Count the transfers of whole `flats`; yield the first of many equal windows: (slice, elements of each)."""
        for flat, access in flats:
            if flat.is_meta and access != "write":
                self.start_bring(flat, flat, purpose)
            if flat.is_meta and access != "read":
                self.send(flat, flat, purpose)
        where = slice(0, min(len(flats[0][0]), self.window))
        yield where, [self._windows[flat.dtype][where] if flat.is_meta else flat[where] for flat, _ in flats]

    def expect(self, x: Tensor) -> None:
        """Do nothing: no file is read ahead."""

    def clear(self, x: Tensor) -> None:
        """Do nothing: no file is there."""

    def versions(self, handle: Tensor) -> set[int]:
        """Return {0}: no update ever writes the buffer."""
        return {0}

    def join(self) -> None:
        """Wait for nothing."""

    def settle(self) -> None:
        """Wait for nothing."""

    def close(self) -> None:
        """Close nothing."""
