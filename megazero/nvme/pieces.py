"""The pieces in which buffers lie on disks, their transfers under way, and what is said when one fails."""

from dataclasses import dataclass

import xxhash
from torch import Tensor

from megazero.base.errors import UserError
from megazero.nvme.disk_queue import ALIGNMENT, Transfer
from megazero.nvme.files import UnnamedFile


@dataclass(eq=False)
class Piece:
    """A piece of a buffer, and its place on a disk.

    Attributes:
        file: on whose disk it is.
        offset: its first byte there.
        nbytes: without the padding that aligns it.
        room: bytes of a whole piece of this dtype.
        hash: of its bytes; None: it was never written, and is zeros.
        version: the updates that have written it; what is sent there counts as none.
        writing: the write under way.
    """

    file: UnnamedFile
    offset: int
    nbytes: int
    room: int
    hash: int | None = None
    version: int = 0
    writing: "Write | None" = None


@dataclass(eq=False)
class Write:
    """A write under way, the memory that it writes from, and whether an update has changed that."""

    transfer: Transfer
    memory: Tensor
    updates: bool


@dataclass(eq=False)
class Loaded:
    """A piece in memory, or on its way there."""

    piece: Piece
    memory: Tensor
    transfer: Transfer | None


def grow(file: UnnamedFile, size: int) -> None:
    """Let a file have so many bytes that are its own. Raises UserError: 602, there is no room."""
    try:
        file.reserve(size)
    except OSError as error:
        what = f"expected room for {size:,} bytes of this rank, got: {error.strerror}"
        raise UserError(602, what, "free some, or give a larger disk", where=file.folder) from None


def lost(piece: Piece, why: str) -> UserError:
    """Return the error for a piece whose bytes are not those that were written."""
    what = f"bytes {piece.offset:,} to {piece.offset + piece.nbytes:,} of what a rank keeps there: {why}"
    return UserError(603, what, "look at the disk, and resume from the last checkpoint", where=piece.file.folder)


def unwritten(piece: Piece, error: OSError) -> UserError:
    """Return the error for a piece that could not be written."""
    what = f"{piece.nbytes:,} bytes could not be written: {error.strerror}"
    return UserError(604, what, "look at the disk, and resume from the last checkpoint", where=piece.file.folder)


def hash_of(memory: Tensor) -> int:
    """Return xxh3 (64 bits) of some bytes."""
    return xxhash.xxh3_64_intdigest(memory.numpy().data)


def padded(nbytes: int) -> int:
    """Return the bytes that a piece takes on a disk."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
