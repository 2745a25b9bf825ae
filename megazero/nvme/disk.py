"""Keep flat buffers on disks: prefetched, written in the background, and verified when read.

A handle represents a buffer on disks: a tensor of torch's meta device, which has a length, a dtype and slices but no
data. Computing with it fails; writing to it silently does nothing. A buffer is stored in pieces of `PIECE` elements,
equal in all buffers of a shard for any dtypes, so an update goes through masters, moments and gradients piece by piece.
The hash of each piece's last write is kept, and a read compares it before it returns any byte. Pieces that were never
written are zeros and are not read.

Bytes pass through a bounded amount of host memory. One background thread copies to and from disks, in order; the
training thread uses `windows` while that thread is idle. With several folders, the one with the fewest bytes gets the
next piece.

(Rajbhandari et al. 2021, ZeRO-Infinity, arXiv 2104.07857, sections 5.1.2, 5.2.2 and 6.3.)
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero.base.errors import UserError
from megazero.comm.home import WINDOW, Access, PagedHome
from megazero.comm.ledger import DISK, Ledger
from megazero.comm.pinned import pinned_bytes
from megazero.nvme.disk_queue import DiskQueue, aligned
from megazero.nvme.files import UnnamedFile
from megazero.nvme.traffic import Loaded, Piece, PieceMemory, PieceTraffic, padded

PIECE = WINDOW  # elements
_AHEAD = 4  # pieces to prefetch in a read
_WINDOWS = 2  # windows to prefetch
Mark = Any  # an event of the device; None: there is nothing to wait for
_UNSENT = 4  # limit of sends in the thread's queue, each of which keeps its tensor alive


class Disk(PagedHome):
    """The buffers of one rank on disks.

    Args:
        folders: one on each disk.
        ledger: counts bytes on disks (as nvme_CATEGORY), host memory for pieces, and traffic (axis "disk", by the
            `purpose` that a call names).
        memory: the limit in bytes of host memory for pieces in flight.
        queue: does the transfers; closed with this object, or when its construction fails.
        device: source of sends and target of reads, in addition to the host.
        window: elements of a piece.

    Raises:
        UserError: 601, a folder cannot be written.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        ledger: Ledger,
        memory: int,
        queue: DiskQueue,
        device: torch.device | None = None,
        *,
        window: int = PIECE,
    ):
        self.window = window
        self._ledger, self._queue = ledger, queue
        self._crossing = Crossing(device or torch.device("cpu"))
        self._sizes = [0] * len(folders)
        self._buffers: dict[int, tuple[Tensor, list[Piece]]] = {}  # by the storage of their handles
        self._traffic = PieceTraffic(queue, PieceMemory(memory, self._crossing.memory, ledger))
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="disk")
        self._sent: deque[Future[None]] = deque()
        self._files: list[UnnamedFile] = []
        for folder in folders:
            try:
                self._files.append(UnnamedFile(folder))
            except OSError as error:
                self.close()
                what = f"cannot be written: {error.strerror}"
                raise UserError(601, what, "give another zero.offload.path", where=folder) from None

    @property
    def direct(self) -> bool:
        """Return True if all files bypass the page cache."""
        return all(file.direct for file in self._files)

    def zeros(self, numel: int, dtype: torch.dtype, category: str) -> Tensor:
        """Reserve a new buffer of zeros on disks; return its handle. Raises UserError 602 if there is no room."""
        handle, before = torch.empty(numel, dtype=dtype, device="meta"), list(self._sizes)
        firsts = range(0, numel, self.window)
        pieces = [self._reserve(min(self.window, numel - first), dtype.itemsize) for first in firsts]
        for file, size in zip(self._files, self._sizes, strict=True):
            try:
                file.reserve(size)
            except OSError as error:
                self._sizes = before
                what = f"expected room for {size:,} bytes of this rank, got: {error.strerror}"
                raise UserError(602, what, "free space there, or use a larger disk", where=file.folder) from None
        self._buffers[handle.untyped_storage()._cdata] = handle, pieces
        self._ledger.hold(f"nvme_{category}", numel * dtype.itemsize)
        return handle

    def send(self, x: Tensor, into: Tensor, purpose: str) -> None:
        """Start to copy `x` to the handle `into`. `x` may be freed at once, but not be overwritten before `join`."""
        self._ledger.add(DISK, f"{purpose} out", x.numel(), x.element_size())
        while len(self._sent) >= _UNSENT:
            self._sent.popleft().result()
        self._sent.append(self._thread.submit(self._write, x, into, self._crossing.mark()))

    def start_bring(self, x: Tensor, into: Tensor, purpose: str) -> Future[None]:
        """Start to copy the handle `x` to `into`, in memory, after all earlier sends; return the future of the copy."""
        self._ledger.add(DISK, f"{purpose} back", x.numel(), x.element_size())
        return self._thread.submit(self._read, x, into, self._crossing.mark())

    def expect(self, x: Tensor) -> None:
        """Start to prefetch a slice that `start_bring` will read soon, as far as memory is free."""
        self._thread.submit(all, (self._traffic.expect(piece) for _, _, piece in self._parts(x)))

    def clear(self, x: Tensor) -> None:
        """Reset a whole buffer to zeros."""
        self.settle()
        for _, _, piece in self._parts(x):
            self._traffic.clear(piece)

    def join(self) -> None:
        """Wait until the tensors of all sends have been copied; they may be overwritten afterwards."""
        while self._sent:
            self._sent.popleft().result()

    def settle(self) -> None:
        """Wait until all sends are written to disks."""
        self.join()
        self._thread.submit(self._traffic.drain).result()

    def windows(
        self, flats: Sequence[tuple[Tensor, Access]], purpose: str, skip: Tensor | None = None
    ) -> Iterator[tuple[slice, list[Tensor]]]:
        """Yield (elements, values of each buffer) for flat buffers of one length, piece by piece; write back changes.

        The next windows are read and the previous ones written while the caller computes. Nothing may be sent or
        brought until the iteration has ended.

        Args:
            flats: handles, or tensors in memory, which are used in place; each with "read", "update", or "write", which
                overwrites all values unread.
            skip: 0-dim; 1: nothing will change, so nothing is read or yielded.
        """
        if skip is not None and bool(skip):
            return
        numel, ahead = len(flats[0][0]), deque[list[Loaded | Tensor]]()
        self.settle()
        for flat, access in flats:
            if flat.is_meta and access != "write":
                self._ledger.add(DISK, f"{purpose} back", numel, flat.element_size())
            if flat.is_meta and access != "read":
                self._ledger.add(DISK, f"{purpose} out", numel, flat.element_size())
        starts, now = range(0, numel, self.window), list[Loaded | Tensor]()
        try:
            for place, first in enumerate(starts):
                for coming in starts[place + len(ahead) : place + _WINDOWS + 1]:
                    ahead.append(window := [])
                    window.extend(
                        self._load(flat, slice(coming, coming + self.window), access) for flat, access in flats
                    )
                now = ahead.popleft()
                where = slice(first, min(first + self.window, numel))
                yield where, [self._tensor(one, flat.dtype) for one, (flat, _) in zip(now, flats, strict=True)]
                for one, (_, access) in zip(now, flats, strict=True):
                    if isinstance(one, Loaded) and access != "read":
                        self._traffic.start_write(one.piece, one.memory, updates=access == "update")
                    elif isinstance(one, Loaded):
                        self._traffic.memory.give(one.memory)
                now = []
            self._traffic.drain()
        finally:
            for one in (*now, *(one for window in ahead for one in window)):
                self._traffic.drop(one)

    def versions(self, handle: Tensor) -> set[int]:
        """Return the set of the update counts of a buffer's pieces: one, unless an update was interrupted."""
        _, pieces = self._buffers[handle.untyped_storage()._cdata]
        return {piece.version for piece in pieces}

    def close(self) -> None:
        """Wait for all transfers; free the buffers and close their files."""
        self._thread.shutdown()
        self._queue.close()
        while self._files:
            self._files.pop().close()

    # Reads and writes of slices, in the background thread.

    def _read(self, source: Tensor, into: Tensor, mark: Mark) -> None:
        coming = deque[tuple[slice, slice, Loaded]]()

        def land() -> None:
            inside, here, loaded = coming[0]
            self._crossing.copy(into[here], self._traffic.arrived(loaded).view(source.dtype)[inside], mark)
            self._traffic.memory.give(loaded.memory)
            coming.popleft()

        try:
            for inside, here, piece in self._parts(source):
                coming.append((inside, here, self._traffic.start_read(piece)))
                if len(coming) > _AHEAD:
                    land()
            while coming:
                land()
        finally:
            for _, _, loaded in coming:
                self._traffic.drop(loaded)

    def _write(self, x: Tensor, into: Tensor, mark: Mark) -> None:
        for inside, here, piece in self._parts(into):
            partly = inside.stop - inside.start < piece.nbytes // into.element_size()
            loaded = self._traffic.start_read(piece, wanted=partly)
            try:
                self._crossing.copy(self._traffic.arrived(loaded).view(into.dtype)[inside], x[here], mark)
            except UserError:
                self._traffic.drop(loaded)
                raise
            self._traffic.start_write(piece, loaded.memory)

    def _parts(self, of: Tensor) -> Iterator[tuple[slice, slice, Piece]]:
        """Yield (elements of the piece, elements of the slice, the piece) for each piece that a slice overlaps."""
        _, pieces = self._buffers[of.untyped_storage()._cdata]
        first = int(of.storage_offset())
        last = first + len(of)
        at = first
        while at < last:
            number = at // self.window
            begins = number * self.window
            stop = min(last, begins + self.window)
            yield slice(at - begins, stop - begins), slice(at - first, stop - first), pieces[number]
            at = stop

    # Pieces.

    def _load(self, flat: Tensor, where: slice, access: Access) -> Loaded | Tensor:
        if not flat.is_meta:
            return flat[where]
        ((_, _, piece),) = self._parts(flat[where])
        return self._traffic.start_read(piece, wanted=access != "write")

    def _tensor(self, one: Loaded | Tensor, dtype: torch.dtype) -> Tensor:
        return one if isinstance(one, Tensor) else self._traffic.arrived(one).view(dtype)

    def _reserve(self, numel: int, itemsize: int) -> Piece:
        disk = min(range(len(self._files)), key=self._sizes.__getitem__)
        offset = self._sizes[disk]
        self._sizes[disk] += padded(numel * itemsize)
        return Piece(self._files[disk], offset, numel * itemsize, self.window * itemsize)


class Crossing:
    """Copies between device memory and the host memory of pieces, in the background thread.

    On a CPU both are host memory. On a GPU the background thread has its own stream and waits for it; the training
    thread does not wait. The training thread marks its stream when it requests a copy: before the mark, the source was
    computed, or the target last used. Not tested on a GPU.
    """

    def __init__(self, device: torch.device):
        self._device = device  # set explicitly, because a new thread's current device is GPU 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def mark(self) -> Mark:
        """Return a mark after all work queued on the current stream so far."""
        return None if self._stream is None else torch.cuda.current_stream(self._device).record_event()

    def copy(self, into: Tensor, source: Tensor, mark: Mark) -> None:
        """Copy after the work before a mark, and wait for the copy."""
        if self._stream is None or not (into.is_cuda or source.is_cuda):
            into.copy_(source)
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            into.copy_(source, non_blocking=True)
        self._stream.synchronize()

    def memory(self, nbytes: int) -> Tensor:
        """Return host memory for pieces, aligned for direct I/O and pinned for a GPU."""
        if self._stream is None:
            return aligned(nbytes)
        with torch.cuda.device(self._device):
            return pinned_bytes(nbytes)
