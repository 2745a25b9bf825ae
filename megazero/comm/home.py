"""Describe the places next to the device's memory where values may rest: the host's memory, and paged homes (disks).

A paged home has more room than memory: a tensor without data (of torch's meta device) stands for a buffer there, and
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
Access = Literal["read", "write", "update"]  # write: all of it, whatever it was


class DiskSpeed(NamedTuple):
    """The speed of a disk, past the system's cache.

    Attributes:
        engine: how the system was asked.
        direct: the system's cache was left out.
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
    """Memory next to the device's."""

    @abstractmethod
    def zeros(self, numel: int, dtype: dtype, category: str) -> Tensor:
        """Return a new flat buffer of zeros."""

    @abstractmethod
    def send(self, x: Tensor, into: Tensor, purpose: str) -> None:
        """Start to copy to this home. `x` may be freed at once, but must not be written to before `join`."""

    @abstractmethod
    def bring(self, x: Tensor, into: Tensor, purpose: str) -> None:
        """Copy from this home, after all that was sent before."""

    @abstractmethod
    def join(self) -> None:
        """Let later work wait for all that was sent: it may be written to afterwards."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until all that was sent has arrived."""


class PagedHome(Home):
    """A home whose buffers have no data in memory.

    Attributes:
        window: elements of a window; each begins at a multiple of it.
    """

    window: int

    @abstractmethod
    def start_bring(self, x: Tensor, into: Tensor, purpose: str) -> Future[None]:
        """Start to copy from this home, after all that was sent before."""

    def bring(self, x: Tensor, into: Tensor, purpose: str) -> None:
        """Copy from this home, after all that was sent before."""
        self.start_bring(x, into, purpose).result()

    @abstractmethod
    def expect(self, x: Tensor) -> None:
        """Start to read what will be brought soon, as far as there is memory for it."""

    @abstractmethod
    def clear(self, x: Tensor) -> None:
        """Let a whole buffer be zeros again."""

    @abstractmethod
    def versions(self, handle: Tensor) -> set[int]:
        """Return how many updates have written a buffer: one number, unless an update is half done."""

    @abstractmethod
    def close(self) -> None:
        """End what is under way; the buffers are gone."""

    @abstractmethod
    def windows(
        self, flats: Sequence[tuple[Tensor, Access]], purpose: str, skip: Tensor | None = None
    ) -> Iterator[tuple[slice, list[Tensor]]]:
        """Yield some flat buffers of one length window by window; see `windows` below."""


def windows(
    home: PagedHome | None, flats: Sequence[tuple[Tensor, Access]], purpose: str, skip: Tensor | None = None
) -> Iterator[tuple[slice, list[Tensor]]]:
    """Yield (elements, these of each flat buffer): all at once where all are in memory, else window by window.

    What the caller changes of a window is written back when it asks for the next one.

    Args:
        home: of those that are not in memory; None: all are.
        flats: of one length, and what is done to each.
        skip: 0-dim; 1: nothing will change, so nothing is yielded of what is not in memory.
    """
    if home is None or not any(flat.is_meta for flat, _ in flats):
        yield slice(0, len(flats[0][0])), [flat for flat, _ in flats]
    else:
        yield from home.windows(flats, purpose, skip)


class Disks(NamedTuple):
    """A kind of paged home: how a rank opens its own, and how fast one is.

    Attributes:
        open: (folders, ledger, bytes of host memory, the rank's device) -> the home, and how it is reached, in words.
        speed: (folder, bytes to take of the disk and of memory) -> its speed.
    """

    open: Callable[[Sequence[Path], Ledger, int, device], tuple[PagedHome, str]]
    speed: Callable[[Path, int], DiskSpeed]


Homes = Mapping[str, Disks]  # by the words of `zero.offload` and `memory.offload`
