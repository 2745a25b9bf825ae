"""Allocate page-locked (pinned) host memory in exact sizes; a GPU reads and writes it directly.

torch's own allocator of pinned memory rounds every block up to a power of two, which can double the memory of a run's
large buffers. Here each buffer is whole pages, which CUDA's runtime keeps locked as long as anything refers to them.
"""

import mmap
import weakref
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

_PORTABLE = 1  # cudaHostRegisterPortable: locked for every device, not only the thread's current one


class _Pages(mmap.mmap):
    """Anonymous pages that a weak reference can watch."""


def pinned_bytes(size: int, runtime: Any = None) -> Tensor:
    """Return `size` bytes of page-locked memory: uint8, all zero.

    Args:
        runtime: has CUDA's `cudaHostRegister` and `cudaHostUnregister`; None: torch's.

    Raises:
        MemoryError: the pages cannot be locked.
    """
    runtime = torch.cuda.cudart() if runtime is None else runtime
    pages = _Pages(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # not in every kernel; huge pages are 512 times fewer pages to lock
        pages.madvise(mmap.MADV_HUGEPAGE)
    pages.madvise(mmap.MADV_DONTFORK)  # after a fork, copy-on-write could give this process pages that are not locked
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    address = memory.data_ptr()
    if error := int(runtime.cudaHostRegister(address, len(memory), _PORTABLE)):
        raise MemoryError(f"cudaHostRegister of {size:,} bytes of host memory: CUDA error {error}")
    # No call at exit, as CUDA may be shut down before the last objects are freed; the process' end unlocks everything.
    weakref.finalize(pages, runtime.cudaHostUnregister, address).atexit = False
    return memory[:size]


def fetched(x: Tensor, device: torch.device) -> Tensor:
    """Return a small tensor on a device. A GPU copies it from pinned memory in stream order: the host does not wait.

    The pinned memory is torch's, whose allocator knows when the memory may be reused.
    """
    if device.type == "cuda" and x.device.type != "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x if x.device.type == device.type else x.to(device)
