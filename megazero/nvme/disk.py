"""Flat buffers that rest on disks: read ahead, written afterwards, verified when they come back.

A buffer on a disk is handled by a tensor without data (of torch's meta device): it has a length, a dtype and slices as
any other; to compute with it fails, but to write into it does nothing, without a word. Its elements lie in pieces of
`PIECE` elements, alike in all buffers of a shard whatever their dtypes, so that an update goes through masters, moments
and gradients piece by piece. Of each piece the hash of what was written last is kept; a read returns no byte before its
piece has that hash. Pieces that were never written are zeros, and are not read.

Bytes go through a bounded amount of memory of the host. Copies to and from disks are made by one thread, in order;
`windows` are for the thread that trains, when that one has nothing to do. Of several folders the one with
the least takes the next piece.

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
_AHEAD = 4  # pieces that are read before they are needed
_WINDOWS = 2  # windows that are
Mark = Any  # an event of the device; None: there is nothing to wait for
_UNSENT = 4  # buffers that wait to be written, whose memory is kept


class Disk(PagedHome):
    """The buffers of one rank on disks.

    Args:
        folders: one on each disk.
        ledger: counts what rests there (as nvme_CATEGORY), the memory for pieces, and, as axis "disk", traffic.
        memory: most bytes of the host for pieces that are on their way.
        queue: does the transfers; closed with the disk, and where that cannot be made.
        device: from which values are sent, and to which they are brought, in addition to those of the host.
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
                what = f"nothing can be written there: {error.strerror}"
                raise UserError(601, what, "give another zero.offload.path", where=folder) from None

    @property
    def direct(self) -> bool:
        """Return whether no byte goes through the system's cache."""
        return all(file.direct for file in self._files)

    def zeros(self, numel: int, dtype: torch.dtype, category: str) -> Tensor:
        """Return the handle of a new buffer of zeros, whose bytes are reserved. Raises UserError: 602, no room."""
        handle, before = torch.empty(numel, dtype=dtype, device="meta"), list(self._sizes)
        firsts = range(0, numel, self.window)
        pieces = [self._reserve(min(self.window, numel - first), dtype.itemsize) for first in firsts]
        for file, size in zip(self._files, self._sizes, strict=True):
            try:
                file.reserve(size)
            except OSError as error:
                self._sizes = before
                what = f"expected room for {size:,} bytes of this rank, got: {error.strerror}"
                raise UserError(602, what, "free some, or give a larger disk", where=file.folder) from None
        self._buffers[handle.untyped_storage()._cdata] = handle, pieces
        self._ledger.hold(f"nvme_{category}", numel * dtype.itemsize)
        return handle

    def send(self, x: Tensor, into: Tensor, purpose: str) -> None:
        """Start to copy to a disk. `x` may be freed at once, but must not be written to before `join`."""
        self._ledger.add(DISK, f"{purpose} out", x.numel(), x.element_size())
        while len(self._sent) >= _UNSENT:
            self._sent.popleft().result()
        self._sent.append(self._thread.submit(self._write, x, into, self._crossing.mark()))

    def start_bring(self, x: Tensor, into: Tensor, purpose: str) -> Future[None]:
        """Start to copy from a disk to memory, after all that was sent before."""
        self._ledger.add(DISK, f"{purpose} back", x.numel(), x.element_size())
        return self._thread.submit(self._read, x, into, self._crossing.mark())

    def expect(self, x: Tensor) -> None:
        """Start to read what will be brought soon, as far as memory is spare."""
        self._thread.submit(self._expect, x)

    def clear(self, x: Tensor) -> None:
        """Let a whole buffer be zeros again."""
        self.settle()
        for _, _, piece in self._parts(x):
            self._traffic.clear(piece)

    def join(self) -> None:
        """Wait until what was sent has been read: it may be written to afterwards."""
        while self._sent:
            self._sent.popleft().result()

    def settle(self) -> None:
        """Wait until all that was sent is on its disk."""
        self.join()
        self._thread.submit(self._traffic.drain).result()

    def windows(
        self, flats: Sequence[tuple[Tensor, Access]], purpose: str, skip: Tensor | None = None
    ) -> Iterator[tuple[slice, list[Tensor]]]:
        """Yield the elements of some flat buffers of one length piece by piece, and write back what was changed.

        The next windows are read, and the last ones written, while the caller computes. Nothing may be sent or brought
        before the last one has been yielded.

        Args:
            flats: handles, or tensors in memory, which are seen in place; and what is done to each.
            skip: 0-dim; 1: nothing will change, so nothing is even read.
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
        """Return how many updates have written a buffer: one number, unless an update is half done."""
        _, pieces = self._buffers[handle.untyped_storage()._cdata]
        return {piece.version for piece in pieces}

    def close(self) -> None:
        """End what is under way; the buffers are gone."""
        self._thread.shutdown()
        self._queue.close()
        while self._files:
            self._files.pop().close()

    # Reading and writing of slices, by the thread.

    def _expect(self, x: Tensor) -> None:
        for _, _, piece in self._parts(x):
            if not self._traffic.expect(piece):
                return

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
        """Yield for each piece under a slice (elements of the piece, elements of the slice, the piece)."""
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
    """Copies between a device's memory and memory from which disks are written, by the thread that waits for disks.

    On a CPU both are one memory. On a GPU the thread has a stream of its own, and waits for it: the thread that trains
    does not. What it copies was computed, or its target was last used, before the thread that trains asked for the
    copy: a mark stands for that moment. Not run on a GPU yet.
    """

    def __init__(self, device: torch.device):
        self._device = device  # a new thread's current device is the first one
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def mark(self) -> Mark:
        """Return a mark for all that is queued on the device so far."""
        return None if self._stream is None else torch.cuda.current_stream(self._device).record_event()

    def copy(self, into: Tensor, source: Tensor, mark: Mark) -> None:
        """Copy what was there at a mark, and wait until it is done."""
        if self._stream is None or not (into.is_cuda or source.is_cuda):
            into.copy_(source)
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            into.copy_(source, non_blocking=True)
        self._stream.synchronize()

    def memory(self, nbytes: int) -> Tensor:
        """Return host memory for the copies that disks are written from and read to, aligned as these need it."""
        if self._stream is None:
            return aligned(nbytes)
        with torch.cuda.device(self._device):
            return pinned_bytes(nbytes)
