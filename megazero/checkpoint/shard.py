"""Write and read one file of a checkpoint: a safetensors file, written once and read in verified blocks.

safetensors (8 bytes of length, a JSON header, the tensors' bytes end to end) is a common format that cannot contain
code, but it does not detect a flipped bit. So the writer hashes every block of the file while writing, and the reader
compares a block's hash with the manifest's before it returns any byte of the block.
"""

import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import torch
import xxhash
from pydantic import StringConstraints
from torch import Tensor

from megazero.base.errors import UserError
from megazero.base.files import flush, write_all
from megazero.base.reading import UnexpectedFileError, open_regular
from megazero.checkpoint.progress import Count, StrictModel

# Bytes that are hashed together. A block fits a core's cache, so hashing it adds no memory traffic to reads and writes.
BLOCK = 1 << 20
NAMES = {torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16", torch.float16: "F16"}
NAMES |= {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"}  # only buffers have these
NAMES |= {torch.uint8: "U8", torch.bool: "BOOL"}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
FLOATS = frozenset(name for name, dtype in DTYPES.items() if dtype.is_floating_point)

ShardName = Annotated[str, StringConstraints(pattern=r"^shard_[0-9]{5}\.safetensors$")]


class File(StrictModel):
    """One shard, as described by its writer.

    Attributes:
        name: in the checkpoint's folder.
        size: bytes.
        blocks: xxh3 hash (64 bits, hex) of each block of BLOCK bytes; the last block may be shorter.
    """

    name: ShardName
    size: Count
    blocks: list[str]


class ReadingStoppedError(Exception):
    """Reading was stopped at the caller's request."""


def hash_of(data: bytes | memoryview) -> str:
    """Return the xxh3 hash of bytes, 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


def plan_shard(tensors: Sequence[tuple[str, torch.dtype, int]], metadata: Mapping[str, str]) -> tuple[bytes, list[int]]:
    """Return (bytes before the first tensor, byte offset of each tensor) for 1-dim tensors (key, dtype, elements)."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    offsets = []
    for key, dtype, numel in tensors:
        size = numel * dtype.itemsize
        header[key] = {"dtype": NAMES[dtype], "shape": [numel], "data_offsets": [at, at + size]}
        offsets.append(at)
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the first tensor begins at a multiple of 8 bytes
    beginning = len(text).to_bytes(8, "little") + text
    return beginning, [len(beginning) + offset for offset in offsets]


def write_shard(path: Path, beginning: bytes, tensors: Iterable[Tensor]) -> File:
    """Write a new file and flush it to the disk.

    Args:
        beginning: from `plan_shard`.
        tensors: contiguous, in host memory, in the order given to `plan_shard`; a tensor may be split into several.

    Raises:
        OSError: the file could not be written.
    """
    hashes, size = [], 0
    with path.open("xb", buffering=0) as file:
        for block in _blocks(chain([memoryview(beginning)], map(_bytes, tensors))):
            hashes.append(hash_of(block))
            write_all(file, block)
            size += len(block)
        flush(file)
    return File(name=path.name, size=size, blocks=hashes)


def key_of(kind: str, name: str, start: int, stop: int) -> str:
    """Return the key of a piece of a parameter in a shard's header."""
    return f"{kind}/{name}[{start}:{stop}]"


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an OSError while reading a file into a UserError.

    Raises:
        UserError: 410, the file is missing or not a regular file; 401, the system cannot read it, though the data on
            the disk may be intact.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, UnexpectedFileError) or error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise damaged(path, f"cannot be read: {error.strerror}") from None
        do = "check the disk and the permissions, and run again"
        raise UserError(401, f"cannot be read: {error.strerror}", do, where=path) from None


def damaged(path: Path, what: str) -> UserError:
    """Return the error for a damaged file of a checkpoint."""
    return UserError(410, what, "restore the file, or resume from another step", where=path)


@contextmanager
def open_shard(folder: Path, file: File, stop: Callable[[], bool] = lambda: False) -> Iterator["ShardReader"]:
    """Open a shard for reading. Symbolic links are not followed, as they could lead out of the checkpoint.

    Args:
        folder: of the checkpoint.
        file: the manifest's entry for the shard.
        stop: polled while reading; True: raise ReadingStoppedError.

    Raises:
        UserError: 410, the file is missing, not a regular file, or of another size; 401, the system cannot read it.
    """
    path = folder / file.name
    with ExitStack() as stack:
        with reading(path):
            handle = stack.enter_context(open_regular(path, follow=False))
            size = os.fstat(handle).st_size
        if size != file.size:
            raise damaged(path, f"expected {file.size:,} bytes, got {size:,}")
        yield ShardReader(path, file, handle, stop)


class ShardReader:
    """A reader of a shard, which verifies each block when it is first read.

    Attributes:
        bytes_read: from the disk.
    """

    def __init__(self, path: Path, file: File, handle: int, stop: Callable[[], bool]):
        self.bytes_read = 0
        self._path, self._file, self._handle, self._stop = path, file, handle, stop
        self._buffer = bytearray(min(BLOCK, file.size))
        self._at = -1  # the block that is in the buffer

    def read(self, start: int, stop: int) -> Iterator[tuple[int, memoryview]]:
        """Yield (position, verified bytes) for bytes [start, stop) of the file; a view is valid until the next yield.

        Raises:
            UserError: 410, a block is damaged; 401, the system cannot read it.
            ReadingStoppedError: `stop` returned True.
        """
        while start < stop:
            if self._stop():
                raise ReadingStoppedError
            index = start // BLOCK
            end = min(stop, (index + 1) * BLOCK)
            yield start, self._block(index)[start - index * BLOCK : end - index * BLOCK]
            start = end

    def _block(self, index: int) -> memoryview:
        start = index * BLOCK
        block = memoryview(self._buffer)[: min(BLOCK, self._file.size - start)]
        if index == self._at:
            return block
        self._at = -1
        got = 0
        with reading(self._path):
            while got < len(block) and (read := os.preadv(self._handle, [block[got:]], start + got)):
                got += read
        self.bytes_read += got
        what = f"block {index} (bytes {start:,} to {start + len(block):,}): expected "
        if got != len(block):
            raise damaged(self._path, f"{what}{len(block):,} bytes, got {got:,}")
        found, expected = hash_of(block), self._file.blocks[index]
        if found != expected:
            raise damaged(self._path, f"{what}xxh3 {expected}, got {found}")
        self._at = index
        return block


def _blocks(views: Iterable[memoryview]) -> Iterator[bytes | memoryview]:
    """Regroup the bytes of views into blocks of BLOCK bytes; copy only if a block spans several views."""
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
