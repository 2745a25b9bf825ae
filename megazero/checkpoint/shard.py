"""Write and read one file of a checkpoint: a safetensors file, written once, and read in blocks that are verified.

safetensors (8 bytes of length, a JSON header, the tensors' bytes end to end) is a common format and cannot express
code, but a flipped bit in it goes unnoticed. So the writer hashes every block of the file on its way to the disk, and
the reader returns no byte of a block before its hash is the one that the manifest has.
"""

import errno
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from megazero.base.errors import UserError
from megazero.base.files import flush, write_all
from megazero.base.reading import parse_object

# Bytes that are hashed together. Fits a core's cache, so that what has been read or is to be written is hashed there.
BLOCK = 1 << 20
NAMES = {torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16", torch.float16: "F16"}
NAMES |= {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"}  # of buffers
NAMES |= {torch.uint8: "U8", torch.bool: "BOOL"}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
FLOATS = frozenset(name for name, dtype in DTYPES.items() if dtype.is_floating_point)


@dataclass(frozen=True)
class Shard:
    """A file as its writer knows it.

    Attributes:
        name: in the checkpoint's folder.
        size: bytes.
        blocks: xxh3 (64 bits, hex) of each BLOCK bytes, the last of what is left.
    """

    name: str
    size: int
    blocks: tuple[str, ...]


def hash_of(data: bytes | memoryview) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def plan_shard(tensors: Sequence[tuple[str, torch.dtype, int]], metadata: Mapping[str, str]) -> tuple[bytes, list[int]]:
    """Return (the file's beginning, the byte where each tensor begins) for 1-dim tensors (key, dtype, elements)."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    offsets = []
    for key, dtype, numel in tensors:
        size = numel * dtype.itemsize
        header[key] = {"dtype": NAMES[dtype], "shape": [numel], "data_offsets": [at, at + size]}
        offsets.append(at)
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    beginning = len(text).to_bytes(8, "little") + text
    return beginning, [len(beginning) + offset for offset in offsets]


def write_shard(path: Path, beginning: bytes, tensors: Iterable[Tensor]) -> Shard:
    """Write a new file, and flush it to the disk.

    Args:
        beginning: from `plan_shard`.
        tensors: contiguous and in host memory, in its order; each may come in parts.

    Raises:
        OSError: it could not be written.
    """
    hashes, size = [], 0
    with path.open("xb", buffering=0) as file:
        for block in _blocks(chain([memoryview(beginning)], map(_bytes, tensors))):
            hashes.append(hash_of(block))
            write_all(file, block)
            size += len(block)
        flush(file)
    return Shard(path.name, size, tuple(hashes))


def key_of(kind: str, name: str, start: int, stop: int) -> str:
    """Return the key of a piece of a parameter in a shard's header."""
    return f"{kind}/{name}[{start}:{stop}]"


class ShardReader:
    """A reader of a shard, which verifies each block when it is first read.

    Args:
        folder: of the checkpoint.
        shard: the manifest's entry of it.

    Attributes:
        bytes_read: from the disk.

    Raises:
        UserError: 410, the file is missing, no plain file, or of another size; on reading, a block is damaged. 401, the
            system cannot read it.
    """

    def __init__(self, folder: Path, shard: Shard):
        self.path, self._shard = folder / shard.name, shard
        self.bytes_read = 0
        try:
            # A FIFO in its place would block for ever, and a link leads out of the checkpoint.
            self._handle = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR):
                raise self._unreadable(error) from None
            raise self._damaged(f"cannot be opened: {error.strerror}") from None
        status = os.fstat(self._handle)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise self._damaged("is no regular file")
        if (size := status.st_size) != shard.size:
            self.close()
            raise self._damaged(f"expected {shard.size:,} bytes, got {size:,}")
        self._buffer = bytearray(min(BLOCK, size))
        self._at = -1  # the block that is in the buffer

    def read(self, start: int, stop: int) -> Iterator[tuple[int, memoryview]]:
        """Yield (position, verified bytes) of bytes [start, stop) of the file; each view is valid until the next."""
        while start < stop:
            index = start // BLOCK
            end = min(stop, (index + 1) * BLOCK)
            block = self._block(index)
            yield start, block[start - index * BLOCK : end - index * BLOCK]
            start = end

    def check_header(self, expected: Mapping[str, tuple[str, int, int]]) -> None:
        """Compare the file's own header with the manifest.

        Args:
            expected: by key (dtype, byte of the file where it begins, elements).

        Raises:
            UserError: 410, another place, dtype or number of elements, or no such key.
        """
        size = int.from_bytes(self._bytes(0, 8), "little")
        try:
            header = parse_object(self._bytes(8, 8 + size)) if 8 + size <= self._shard.size else {}
        except ValueError:
            header = {}
        for key, (dtype, at, numel) in expected.items():
            begins = at - 8 - size
            offsets = [begins, begins + numel * DTYPES[dtype].itemsize]
            if header.get(key) != {"dtype": dtype, "shape": [numel], "data_offsets": offsets}:
                raise self._damaged(f"the manifest has {key} of {dtype} at byte {at:,}, the file's header has not")

    def _bytes(self, start: int, stop: int) -> bytes:
        parts = (
            bytes(data) for _, data in self.read(start, min(stop, self._shard.size))
        )  # a view is good until the next
        return b"".join(parts)

    def close(self) -> None:
        os.close(self._handle)

    def _block(self, index: int) -> memoryview:
        start = index * BLOCK
        block = memoryview(self._buffer)[: min(BLOCK, self._shard.size - start)]
        if index == self._at:
            return block
        self._at = -1
        got = 0
        try:
            while got < len(block) and (read := os.preadv(self._handle, [block[got:]], start + got)):
                got += read
        except OSError as error:
            raise self._unreadable(error) from None
        self.bytes_read += got
        what = f"block {index} (bytes {start:,} to {start + len(block):,}): expected "
        if got != len(block):
            raise self._damaged(f"{what}{len(block):,} bytes, got {got:,}")
        found, expected = hash_of(block), self._shard.blocks[index]
        if found != expected:
            raise self._damaged(f"{what}xxh3 {expected}, got {found}")
        self._at = index
        return block

    def _unreadable(self, error: OSError) -> UserError:
        """Return the error for a fault of the machine, which says nothing about the data on the disk."""
        return UserError(401, f"cannot be read: {error.strerror}", "mend that, and run again", where=self.path)

    def _damaged(self, what: str) -> UserError:
        return UserError(410, what, "restore the file, or resume from another step", where=self.path)


def _blocks(views: Iterable[memoryview]) -> Iterator[bytes | memoryview]:
    """Yield the same bytes in BLOCK pieces; copy only where a piece consists of several views."""
    parts: list[memoryview] = []
    missing = BLOCK
    for view in views:
        while len(view):
            parts.append(view[:missing])
            missing -= len(parts[-1])
            view = view[len(parts[-1]) :]
            if missing == 0:
                yield parts[0] if len(parts) == 1 else b"".join(parts)
                parts, missing = [], BLOCK
    if parts:
        yield b"".join(parts)


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().view(torch.uint8).numpy().data
