"""Define the homes of offloaded values: the host's memory, and paged homes (disks).

A paged home has more room than memory: a tensor without data (on torch's meta device) stands for a buffer there, and
only windows of it are in memory at a time.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Literal, NamedTuple

from torch import Tensor, device, dtype

from megazero.comm.ledger import Ledger

WINDOW = 1 << 20  # elements of a window of a paged home
Access = Literal["read", "write", "update"]  # write: all of it is overwritten, unread


class DiskSpeed(NamedTuple):
    """The speed of a disk.

    Attributes:
        engine: the interface of the system that was used.
        direct: the system's cache was bypassed.
        depth, block: blocks in flight, and bytes of each.
        read, write: bytes/s.
    """

    engine: str
    direct: bool
    depth: int
    block: int
    read: float
    write: float


class Home(ABC):
    """A place for values outside of the device's memory."""

    @abstractmethod
    def zeros(self, numel: int, dtype: dtype, category: str) -> Tensor:
        """Return a new flat buffer of zeros."""

    @abstractmethod
    def send(self, x: Tensor, into: Tensor, purpose: str) -> None:
        """Start to copy x to this home. `x` may be freed at once, but must not be written to before `join`."""

    @abstractmethod
    def bring(self, x: Tensor, into: Tensor, purpose: str) -> None:
        """Copy x from this home, after all earlier sends."""

    @abstractmethod
    def join(self) -> None:
        """Make later work wait for all sends: the tensors that were sent may be written to afterwards."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until all sends have arrived."""


class PagedHome(Home):
    """A home whose buffers have no data in memory.

    Attributes:
        window: the number of elements that are in memory at a time; each window begins at a multiple of it.
    """

    window: int

    @abstractmethod
    def start_bring(self, x: Tensor, into: Tensor, purpose: str) -> Future[None]:
        """Start to copy x from this home, after all earlier sends."""

    def bring(self, x: Tensor, into: Tensor, purpose: str) -> None:
        """Copy x from this home, after all earlier sends."""
        self.start_bring(x, into, purpose).result()

    @abstractmethod
    def expect(self, x: Tensor) -> None:
        """Start to read a buffer that will be brought soon, as far as memory allows."""

    @abstractmethod
    def clear(self, x: Tensor) -> None:
        """Set a whole buffer to zeros."""

    @abstractmethod
    def versions(self, handle: Tensor) -> set[int]:
        """Return how many updates have written each part of a buffer: one number, unless an update is incomplete."""

    @abstractmethod
    def close(self) -> None:
        """End the operations under way and drop the buffers."""

    @abstractmethod
    def windows(
        self, flats: Sequence[tuple[Tensor, Access]], purpose: str, skip: Tensor | None = None
    ) -> Iterator[tuple[slice, list[Tensor]]]:
        """Yield flat buffers of equal length window by window; see `windows` below."""


def windows(
    home: PagedHome | None, flats: Sequence[tuple[Tensor, Access]], purpose: str, skip: Tensor | None = None
) -> Iterator[tuple[slice, list[Tensor]]]:
    """Yield (slice, that slice of each flat buffer): all at once if all are in memory, else window by window.

    The caller's changes to a window are written back when it asks for the next window.

    Args:
        home: the home of the buffers that are not in memory; None: all are in memory.
        flats: buffers of equal length, each with the caller's access: "read", "write" (all of it, unread) or "update".
        skip: 0-dim; 1: nothing will change, so nothing is yielded unless all buffers are in memory.
    """
    if home is None or not any(flat.is_meta for flat, _ in flats):
        yield slice(0, len(flats[0][0])), [flat for flat, _ in flats]
    else:
        yield from home.windows(flats, purpose, skip)


class Disks(NamedTuple):
    """A kind of paged home: functions that open one for a rank, and measure its speed.

    Attributes:
        open: (folders, ledger, bytes of host memory, the rank's device) -> the home, and a text on how it is accessed.
        speed: (folder, bytes to use on the disk and in memory) -> the disk's speed.
    """

    open: Callable[[Sequence[Path], Ledger, int, device], tuple[PagedHome, str]]
    speed: Callable[[Path, int], DiskSpeed]


Homes = Mapping[str, Disks]  # by the values of `zero.offload` and `memory.offload`
