"""Read and write files in parallel with the computation: the queue of csrc/disk_queue.cpp, by io_uring or by threads.

A queue keeps a reference to a transfer's tensor until the transfer is waited for. Waiting releases the GIL. Direct I/O
bypasses the page cache, so that measured disk speed and memory use are real; addresses, lengths and offsets must then
be multiples of `ALIGNMENT`.
"""

import ctypes
import errno
import os
from functools import cache, cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from megazero.kernels.build import BuildError, build_library, find_gcc

Engine = Literal["io_uring", "threads"]
ENGINES: tuple[Engine, ...] = ("io_uring", "threads")  # in order of preference
ALIGNMENT = 4096  # bytes; the largest sector size of disks in use
BLOCK = 1 << 20  # bytes of one request to the system
DEPTH = 16  # requests in flight
_SOURCE = Path(__file__).parent / "csrc" / "disk_queue.cpp"
_FLAGS = ["-O2", "-std=c++20", "-fPIC", "-shared", "-pthread"]


class Transfer:
    """A read or a write under way."""

    def __init__(self, queue: "DiskQueue", ticket: int, tensor: Tensor):
        self._queue, self._ticket, self._tensor = queue, ticket, tensor

    @cached_property
    def _error(self) -> int:
        return self._queue.wait_for(self._ticket)

    def wait(self) -> Tensor:
        """Wait until the transfer has ended; return the tensor.

        Raises:
            OSError: from the system; ENODATA: the file ended before the transfer was complete.
        """
        if self._error:
            reason = "the file ends too early" if self._error == errno.ENODATA else os.strerror(self._error)
            raise OSError(self._error, reason)
        return self._tensor


class DiskQueue:
    """The transfers of one rank.

    Args:
        engine: the system interface; None: io_uring if it is available, else threads.
        depth: blocks in flight.
        block: bytes of each block, a multiple of ALIGNMENT.

    Attributes:
        engine: the engine in use.

    Raises:
        BuildError: there is neither a compiler nor a library built before.
        OSError: the system refuses the requested engine.
    """

    def __init__(self, engine: Engine | None = None, *, depth: int = DEPTH, block: int = BLOCK):
        assert depth >= 1 and block % ALIGNMENT == 0, f"depth {depth}, block {block}"
        self._block, self._library = block, _library()
        self._queue: int | None = None
        self._under_way: dict[int, Tensor] = {}  # keeps tensors alive while the system uses their memory
        error = ctypes.c_int()
        self.engine: Engine
        for self.engine in ENGINES if engine is None else (engine,):
            self._queue = self._library.megazero_disk_open(self.engine == "io_uring", depth, ctypes.byref(error))
            if self._queue is not None:
                return
        raise OSError(error.value, f"{self.engine}: {os.strerror(error.value)}")

    def read(self, file: int, offset: int, into: Tensor) -> Transfer:
        """Start to fill a tensor with a file's bytes from `offset`."""
        return self._submit(file, offset, into, write=False)

    def write(self, file: int, offset: int, source: Tensor) -> Transfer:
        """Start to write a tensor to a file at byte `offset`; it must not change until the transfer has ended."""
        return self._submit(file, offset, source, write=True)

    def _submit(self, file: int, offset: int, tensor: Tensor, *, write: bool) -> Transfer:
        assert tensor.is_contiguous() and tensor.device.type == "cpu" and self._queue is not None
        ticket = self._library.megazero_disk_submit(
            self._queue, file, write, tensor.data_ptr(), tensor.nbytes, offset, self._block
        )
        self._under_way[ticket] = tensor
        return Transfer(self, ticket, tensor)

    def wait_for(self, ticket: int) -> int:
        """Wait for a transfer; return 0 or the system's error number. Call it once for each transfer."""
        assert self._queue is not None, "closed"
        error = self._library.megazero_disk_wait(self._queue, ticket)
        del self._under_way[ticket]
        return error

    def close(self) -> None:
        """Wait for all transfers; free the queue."""
        if self._queue is not None:
            self._library.megazero_disk_close(self._queue)
            self._queue = None
            self._under_way.clear()


def aligned(nbytes: int) -> Tensor:
    """Return new host memory of `nbytes` >= 1 bytes whose address is a multiple of ALIGNMENT."""
    whole = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8)
    skip = -whole.data_ptr() % ALIGNMENT
    return whole[skip : skip + nbytes]


@cache
def _library() -> ctypes.CDLL:
    """Build the library (once per machine) and load it. Raises BuildError."""
    path = build_library(_SOURCE, find_gcc, _FLAGS)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} cannot be loaded: {error}") from None
    pointer, number, long = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64
    library.megazero_disk_open.argtypes = [number, ctypes.c_uint, ctypes.POINTER(number)]
    library.megazero_disk_open.restype = pointer
    library.megazero_disk_close.argtypes = [pointer]
    library.megazero_disk_close.restype = None
    library.megazero_disk_submit.argtypes = [pointer, number, number, pointer, long, long, long]
    library.megazero_disk_submit.restype = ctypes.c_int64
    library.megazero_disk_wait.argtypes = [pointer, ctypes.c_int64]
    library.megazero_disk_wait.restype = number
    return library
