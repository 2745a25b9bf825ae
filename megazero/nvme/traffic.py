"""Prefetch and write back the pieces of buffers on disks, through bounded host memory."""

from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import xxhash
from torch import Tensor

from megazero.base.errors import UserError
from megazero.comm.ledger import Ledger
from megazero.nvme.disk_queue import ALIGNMENT, DiskQueue, Transfer
from megazero.nvme.files import UnnamedFile

_LOST = "check the disk, and resume from the last checkpoint"


@dataclass(eq=False)
class Piece:
    """A piece of a buffer, and its place on a disk.

    Attributes:
        file: the file that contains it.
        offset: its first byte in the file.
        nbytes: its size without alignment padding.
        room: bytes of a full piece of this dtype.
        hash: xxh3 hash of its bytes; None: it was never written, and is zeros.
        version: number of updates that have written it; sends do not count.
        writing: a write is under way.
    """

    file: UnnamedFile
    offset: int
    nbytes: int
    room: int
    hash: int | None = None
    version: int = 0
    writing: bool = False


@dataclass(eq=False)
class Loaded:
    """A piece in memory, or being read."""

    piece: Piece
    memory: Tensor
    transfer: Transfer | None


class PieceMemory:
    """A pool of reusable, bounded memory for pieces.

    Args:
        most: the limit in bytes; `take` with `beyond` may exceed it.
        allocate: function that returns n bytes.
        ledger: counts the memory.
    """

    def __init__(self, most: int, allocate: Callable[[int], Tensor], ledger: Ledger):
        self._left, self._allocate, self._ledger = most, allocate, ledger
        self._free = defaultdict[int, list[Tensor]](list)  # by size

    @property
    def spare(self) -> int:
        """Return the free bytes."""
        return self._left + sum(size * len(free) for size, free in self._free.items())

    def take(self, size: int, *, beyond: bool) -> Tensor | None:
        """Return memory of `size` bytes; None if the limit does not allow it.

        Args:
            beyond: exceed the limit rather than return None.
        """
        if self._free[size]:
            return self._free[size].pop()
        for other, free in self._free.items():
            while free and self._left < size:
                free.pop()
                self._left += other
                self._ledger.hold("host_pieces", -other)
        if self._left < size and not beyond:
            return None
        self._left -= size
        self._ledger.hold("host_pieces", size)
        return self._allocate(size)

    def give(self, memory: Tensor) -> None:
        """Return memory to the pool."""
        self._free[len(memory)].append(memory)


class PieceTraffic:
    """The reads and writes of one rank's pieces.

    Args:
        queue: does the transfers.
        memory: for pieces in flight.
    """

    def __init__(self, queue: DiskQueue, memory: PieceMemory):
        self._queue, self.memory = queue, memory
        self._expected: dict[Piece, Loaded] = {}  # prefetched pieces, in order
        self._writes: deque[tuple[Piece, Transfer, Tensor, bool]] = deque()  # under way: (..., memory, by an update)

    def expect(self, piece: Piece) -> bool:
        """Start to prefetch a piece; return False if there is no free memory."""
        if piece in self._expected or piece.hash is None or piece.writing:
            return True
        if self.memory.spare < piece.room:
            return False
        self._expected[piece] = self.start_read(piece)
        return True

    def clear(self, piece: Piece) -> None:
        """Reset a piece to zeros."""
        piece.hash = None
        self.drop(self._expected.pop(piece, None))

    def drop(self, one: Loaded | Tensor | None) -> None:
        """Free the memory of a piece that is not needed, after its read has ended; do nothing for a tensor or None."""
        if isinstance(one, Loaded):
            if one.transfer is not None:
                with suppress(OSError):
                    one.transfer.wait()
            self.memory.give(one.memory)

    def start_read(self, piece: Piece, *, wanted: bool = True) -> Loaded:
        """Take memory for a piece and start to read it; if not `wanted`, only take memory, to be overwritten whole."""
        expected = self._expected.pop(piece, None)
        if expected is not None and wanted:
            return expected
        self.drop(expected)
        if piece.writing:
            self.drain()
        memory = self._room(piece.room)
        if piece.hash is None or not wanted:
            return Loaded(piece, memory.zero_() if wanted else memory, None)
        return Loaded(piece, memory, self._queue.read(piece.file.handle, piece.offset, memory[: padded(piece.nbytes)]))

    def arrived(self, loaded: Loaded) -> Tensor:
        """Wait for a piece; return its bytes. Raises UserError 603 if they cannot be read or do not match the hash."""
        piece, memory = loaded.piece, loaded.memory[: loaded.piece.nbytes]
        if loaded.transfer is not None:
            try:
                loaded.transfer.wait()
            except OSError as error:
                raise _lost(piece, f"cannot be read: {error.strerror}") from None
            if (found := _hash_of(memory)) != piece.hash:
                raise _lost(piece, f"expected xxh3 {piece.hash:016x}, got {found:016x}")
        return memory

    def start_write(self, piece: Piece, memory: Tensor, *, updates: bool = False) -> None:
        """Start to write a piece from `memory`, to be freed after the write; `updates`: count it in `Piece.version`."""
        piece.hash = _hash_of(memory[: piece.nbytes])
        transfer = self._queue.write(piece.file.handle, piece.offset, memory[: padded(piece.nbytes)])
        piece.writing = True
        self._writes.append((piece, transfer, memory, updates))

    def drain(self, leave: int = 0) -> None:
        """Wait for writes, oldest first, until `leave` are left. Raises UserError 604 if a write fails."""
        while len(self._writes) > leave:
            piece, transfer, memory, updates = self._writes[0]
            try:
                transfer.wait()
            except OSError as error:
                what = f"{piece.nbytes:,} bytes could not be written: {error.strerror}"
                raise UserError(604, what, _LOST, where=piece.file.folder) from None
            self._writes.popleft()
            piece.writing = False
            piece.version += updates
            self.memory.give(memory)

    def _room(self, size: int) -> Tensor:
        """Return memory for a piece; if the limit is reached, drop prefetched pieces, then wait for writes."""
        while (memory := self.memory.take(size, beyond=not (self._expected or self._writes))) is None:
            if self._expected:  # drop the one that is needed last
                self.drop(self._expected.popitem()[1])
            else:
                self.drain(len(self._writes) - 1)
        return memory


def _lost(piece: Piece, why: str) -> UserError:
    """Return the error for a piece whose bytes are unreadable or differ from the bytes written."""
    what = f"bytes {piece.offset:,} to {piece.offset + piece.nbytes:,} of a rank's offloaded state: {why}"
    return UserError(603, what, _LOST, where=piece.file.folder)


def _hash_of(memory: Tensor) -> int:
    """Return the 64-bit xxh3 hash of the bytes of a uint8 tensor."""
    return xxhash.xxh3_64_intdigest(memory.numpy().data)


def padded(nbytes: int) -> int:
    """Return the bytes that a piece occupies on a disk, alignment included."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
