"""Flat buffers that rest on disks: read ahead, written behind, verified when they come back.

A buffer on a disk is handled by a tensor without data (of torch's meta device): it has a length, a dtype and slices as
any other, and whoever computes with it by mistake fails. Its elements lie in pieces of `PIECE` elements, alike in all
buffers of a shard whatever their dtypes, so that an update goes through masters, moments and gradients piece by piece.
Of each piece the hash of what was written last is kept; a read returns no byte before its piece has that hash. Pieces
that were never written are zeros, and are not read.

Bytes go through a bounded amount of memory of the host. Copies to and from disks are made by one thread, in order;
`windows` are for the thread that trains, when that one has nothing to do. Of several folders the one with
the least takes the next piece.

(Rajbhandari et al. 2021, ZeRO-Infinity, arXiv 2104.07857, sections 5.1.2, 5.2.2 and 6.3.)
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from megazero.base.errors import UserError
from megazero.comm.ledger import DISK, Ledger
from megazero.nvme.disk_queue import ALIGNMENT, DiskQueue, Transfer, aligned
from megazero.nvme.files import UnnamedFile, open_unnamed

PIECE = 1 << 20  # elements
_AHEAD = 4  # pieces that are read before they are needed
_WINDOWS = 2  # windows that are
_TRIES = 3  # to write a piece


@dataclass(eq=False)
class _Piece:
    """A piece of a buffer, and its place on a disk.

    Attributes:
        file: on whose disk it is.
        offset: its first byte there.
        nbytes: without the padding that aligns it.
        room: bytes of a whole piece of this dtype.
        hash: of its bytes; None: it was never written, and is zeros.
        version: how often it was written.
        writing: the write under way.
    """

    file: UnnamedFile
    offset: int
    nbytes: int
    room: int
    hash: int | None = None
    version: int = 0
    writing: "_Write | None" = None


@dataclass(eq=False)
class _Write:
    transfer: Transfer
    memory: Tensor
    tries: int = 1


@dataclass(eq=False)
class _Loaded:
    """A piece in memory, or on its way there."""

    piece: _Piece
    memory: Tensor
    transfer: Transfer | None


class Disk:
    """The buffers of one rank on disks.

    Args:
        folders: one on each disk.
        ledger: counts what rests there (as nvme_CATEGORY), the memory for pieces, and, as axis "disk", traffic.
        memory: most bytes of the host for pieces that are on their way.
        queue: does the transfers.

    Raises:
        UserError: 601, a folder cannot be written.
    """

    apart = True

    def __init__(self, folders: Sequence[Path], ledger: Ledger, memory: int, queue: DiskQueue):
        self._ledger, self._queue = ledger, queue
        self._files = list[UnnamedFile]()
        self._open(folders)
        self._sizes = [0] * len(folders)
        self._buffers: dict[int, tuple[Tensor, list[_Piece]]] = {}  # by the storage of their handles
        self._free: dict[int, list[Tensor]] = {}  # memory for pieces, by its size
        self._left = memory
        self._writes: deque[_Piece] = deque()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="disk")
        self._sent: deque[Future[None]] = deque()

    def zeros(self, numel: int, dtype: torch.dtype, category: str) -> Tensor:
        """Return the handle of a new buffer of zeros, whose bytes are reserved. Raises UserError: 602, no room."""
        handle, before = torch.empty(numel, dtype=dtype, device="meta"), list(self._sizes)
        pieces = [self._reserve(min(PIECE, numel - first), dtype.itemsize) for first in range(0, numel, PIECE)]
        try:
            for file, size in zip(self._files, self._sizes, strict=True):
                _grow(file, size)
        except UserError:
            self._sizes = before
            raise
        self._buffers[handle.untyped_storage()._cdata] = handle, pieces
        self._ledger.hold(f"nvme_{category}", numel * dtype.itemsize)
        return handle

    def send(self, x: Tensor, into: Tensor, purpose: str) -> None:
        """Start to copy to a disk. `x` may be freed at once, but must not be written to before `join`."""
        assert x.device.type == "cpu", "the thread is ordered with no stream"
        self._ledger.add(DISK, f"{purpose} out", x.numel(), x.element_size())
        self._sent.append(self._thread.submit(self._write, x, into))

    def start_bring(self, x: Tensor, into: Tensor, purpose: str) -> "Future[None]":
        """Start to copy from a disk to memory, behind all that was sent before."""
        assert into.device.type == "cpu", "the thread is ordered with no stream"
        self._ledger.add(DISK, f"{purpose} back", x.numel(), x.element_size())
        return self._thread.submit(self._read, x, into)

    def bring(self, x: Tensor, into: Tensor, purpose: str) -> None:
        """Copy from a disk to memory."""
        self.start_bring(x, into, purpose).result()

    def join(self) -> None:
        """Wait until what was sent has been read: it may be written to afterwards."""
        while self._sent:
            self._sent.popleft().result()

    def settle(self) -> None:
        """Wait until all that was sent is on its disk."""
        self.join()
        self._thread.submit(self._drain).result()

    def windows(
        self, flats: Sequence[Tensor], written: Sequence[bool], purpose: str
    ) -> Iterator[tuple[slice, list[Tensor]]]:
        """Yield the elements of some flat buffers of one length piece by piece, and write back what was changed.

        The next windows are read, and the last ones written, while the caller computes. Nothing may be sent or brought
        before the last one has been yielded.

        Args:
            flats: handles, or tensors in memory, which are seen in place.
            written: of each whether the caller changes it.
        """
        numel, ahead = len(flats[0]), deque[list[_Loaded | Tensor]]()
        self.settle()
        for flat, changes in zip(flats, written, strict=True):
            if flat.is_meta:
                self._ledger.add(DISK, f"{purpose} back", numel, flat.element_size())
                if changes:
                    self._ledger.add(DISK, f"{purpose} out", numel, flat.element_size())
        starts, now = range(0, numel, PIECE), list[_Loaded | Tensor]()
        try:
            for place, first in enumerate(starts):
                for coming in starts[place + len(ahead) : place + _WINDOWS + 1]:
                    ahead.append(window := [])
                    window.extend(self._load(flat, slice(coming, coming + PIECE)) for flat in flats)
                now = ahead.popleft()
                where = slice(first, min(first + PIECE, numel))
                yield where, [self._tensor(one, flat.dtype) for one, flat in zip(now, flats, strict=True)]
                self._take_back(now, written)
                now = []
            self._drain()
        finally:
            for one in (*now, *(one for window in ahead for one in window)):
                self._drop(one)

    def version(self, handle: Tensor) -> int:
        """Return how often each piece of a buffer was written; -1: not all of them equally often."""
        _, pieces = self._buffers[handle.untyped_storage()._cdata]
        versions = {piece.version for piece in pieces}
        return versions.pop() if len(versions) == 1 else -1

    def close(self) -> None:
        """End what is under way; the buffers are gone."""
        self._thread.shutdown()
        self._queue.close()
        while self._files:
            self._files.pop().close()

    def _open(self, folders: Sequence[Path]) -> None:
        try:
            for folder in folders:
                self._files.append(open_unnamed(folder))
        except OSError as error:
            while self._files:
                self._files.pop().close()
            what = f"nothing can be written there: {error.strerror}"
            raise UserError(601, what, "give another zero.offload.path", where=folder) from None

    # Reading and writing of slices, by the thread.

    def _read(self, source: Tensor, into: Tensor) -> None:
        coming = deque[tuple[slice, slice, _Loaded]]()

        def land() -> None:
            inside, here, loaded = coming[0]
            into[here].copy_(self._arrived(loaded).view(source.dtype)[inside])
            self._give(loaded.memory)
            coming.popleft()

        try:
            for inside, here, piece in self._parts(source):
                coming.append((inside, here, self._start_read(piece)))
                if len(coming) > _AHEAD:
                    land()
            while coming:
                land()
        finally:
            for _, _, loaded in coming:
                self._drop(loaded)

    def _write(self, x: Tensor, into: Tensor) -> None:
        for inside, here, piece in self._parts(into):
            loaded = self._start_read(piece, wanted=inside.stop - inside.start < piece.nbytes // into.element_size())
            try:
                self._arrived(loaded).view(into.dtype)[inside].copy_(x[here])
            except UserError:
                self._drop(loaded)
                raise
            self._start_write(piece, loaded.memory)

    def _parts(self, of: Tensor) -> Iterator[tuple[slice, slice, _Piece]]:
        """Yield for each piece under a slice (elements of the piece, elements of the slice, the piece)."""
        _, pieces = self._buffers[of.untyped_storage()._cdata]
        first = int(of.storage_offset())
        last = first + len(of)
        at = first
        while at < last:
            number = at // PIECE
            stop = min(last, (number + 1) * PIECE)
            yield slice(at - number * PIECE, stop - number * PIECE), slice(at - first, stop - first), pieces[number]
            at = stop

    # Pieces.

    def _load(self, flat: Tensor, where: slice) -> "_Loaded | Tensor":
        if not flat.is_meta:
            return flat[where]
        ((_, _, piece),) = self._parts(flat[where])
        return self._start_read(piece)

    def _take_back(self, window: "Sequence[_Loaded | Tensor]", written: Sequence[bool]) -> None:
        """Write back what a caller has changed; free the rest."""
        for one, changes in zip(window, written, strict=True):
            if isinstance(one, _Loaded) and changes:
                self._start_write(one.piece, one.memory)
            elif isinstance(one, _Loaded):
                self._give(one.memory)

    def _drop(self, one: "_Loaded | Tensor") -> None:
        """Free the memory of a piece that nobody will look at."""
        if isinstance(one, _Loaded):
            if one.transfer is not None:
                with suppress(OSError):
                    one.transfer.wait()
            self._give(one.memory)

    def _tensor(self, one: "_Loaded | Tensor", dtype: torch.dtype) -> Tensor:
        return one if isinstance(one, Tensor) else self._arrived(one).view(dtype)

    def _start_read(self, piece: _Piece, *, wanted: bool = True) -> _Loaded:
        """Give a piece memory, and start to read it there unless all of it will be written anew."""
        if piece.writing is not None:
            self._drain()
        memory = self._memory(piece.room)
        if piece.hash is None or not wanted:
            return _Loaded(piece, memory.zero_() if wanted else memory, None)
        into = memory[: _padded(piece.nbytes)]
        return _Loaded(piece, memory, self._queue.read(piece.file.handle, piece.offset, into))

    def _arrived(self, loaded: _Loaded) -> Tensor:
        """Return the bytes of a piece when they have come. Raises UserError: 603, they cannot be read or are others."""
        piece, memory = loaded.piece, loaded.memory[: loaded.piece.nbytes]
        if loaded.transfer is not None:
            try:
                loaded.transfer.wait()
            except OSError as error:
                raise _lost(piece, f"cannot be read: {error.strerror}") from None
            if (found := _hash(memory)) != piece.hash:
                raise _lost(piece, f"expected xxh3 {piece.hash:016x}, got {found:016x}")
        return memory

    def _start_write(self, piece: _Piece, memory: Tensor) -> None:
        piece.hash = _hash(memory[: piece.nbytes])
        piece.writing = _Write(self._submit(piece, memory), memory)
        self._writes.append(piece)

    def _submit(self, piece: _Piece, memory: Tensor) -> Transfer:
        return self._queue.write(piece.file.handle, piece.offset, memory[: _padded(piece.nbytes)])

    def _drain(self, leave: int = 0) -> None:
        """Wait for writes, the oldest first. Raises UserError: 604, one fails again and again."""
        while len(self._writes) > leave:
            piece = self._writes[0]
            write = piece.writing
            assert write is not None
            try:
                write.transfer.wait()
            except OSError as error:
                if write.tries == _TRIES:
                    raise _unwritten(piece, error) from None
                piece.writing = _Write(self._submit(piece, write.memory), write.memory, write.tries + 1)
                continue
            self._writes.popleft()
            piece.writing = None
            piece.version += 1
            self._give(write.memory)

    def _memory(self, size: int) -> Tensor:
        """Return memory for a piece; wait for writes that have some where no more may be taken."""
        free = self._free.setdefault(size, [])
        while not free and self._left < size and self._writes:
            self._drain(len(self._writes) - 1)
        if free:
            return free.pop()
        self._left -= size  # below zero where so many pieces are needed at once
        self._ledger.hold("host_pieces", size)
        return aligned(size)

    def _give(self, memory: Tensor) -> None:
        self._free[len(memory)].append(memory)

    def _reserve(self, numel: int, itemsize: int) -> _Piece:
        disk = min(range(len(self._files)), key=self._sizes.__getitem__)
        offset = self._sizes[disk]
        self._sizes[disk] += _padded(numel * itemsize)
        return _Piece(self._files[disk], offset, numel * itemsize, PIECE * itemsize)


def _grow(file: UnnamedFile, size: int) -> None:
    try:
        file.reserve(size)
    except OSError as error:
        what = f"expected room for {size:,} bytes of this rank, got: {error.strerror}"
        raise UserError(602, what, "free some, or give a larger disk", where=file.folder) from None


def _lost(piece: _Piece, why: str) -> UserError:
    what = f"bytes {piece.offset:,} to {piece.offset + piece.nbytes:,} of what a rank keeps there: {why}"
    return UserError(603, what, "look at the disk, and resume from the last checkpoint", where=piece.file.folder)


def _unwritten(piece: _Piece, error: OSError) -> UserError:
    what = f"{piece.nbytes:,} bytes could not be written, {_TRIES} times: {error.strerror}"
    return UserError(604, what, "look at the disk, and resume from the last checkpoint", where=piece.file.folder)


def _hash(memory: Tensor) -> int:
    return xxhash.xxh3_64_intdigest(memory.numpy().data)


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
