"""Allocate page-locked memory of the host in exact sizes, which a GPU reads and writes by itself.

torch's own allocator of pinned memory rounds every block up to a power of two: for the large buffers of a run that is
up to twice the memory. Here each buffer is whole pages, locked by CUDA's runtime until nothing refers to them any more.
"""

import mmap
import weakref
from typing import Any

import torch
from torch import Tensor

_PORTABLE = 1  # cudaHostRegisterPortable: locked for every device, whichever is the thread's current one


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
    pages.madvise(mmap.MADV_DONTFORK)  # a child's first write would give this process other pages than the locked ones
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    address = memory.data_ptr()
    if error := int(runtime.cudaHostRegister(address, len(memory), _PORTABLE)):
        raise MemoryError(f"cudaHostRegister of {size:,} bytes of host memory: CUDA error {error}")
    # The process' end unlocks everything: CUDA may be gone before the last objects are.
    weakref.finalize(pages, runtime.cudaHostUnregister, address).atexit = False
    return memory[:size]


def fetched(x: Tensor, device: torch.device) -> Tensor:
    """Return a small tensor on a device. A GPU fetches that of the host itself, when it comes to it: no host waits.

    The memory that it is fetched from is torch's, which knows when it may be used again.
    """
    if device.type == "cuda" and x.device.type != "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x if x.device.type == device.type else x.to(device)
