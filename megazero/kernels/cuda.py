"""Load the library of csrc/cuda.cu, which implements the operations of `schema` for tensors on NVIDIA GPUs."""

from collections.abc import Sequence
from pathlib import Path

import torch

from megazero.kernels.build import BuildError, build_cuda, open_library

SOURCE = Path(__file__).parent / "csrc" / "cuda.cu"


def load() -> Path:
    """Build the library for the GPUs of this machine, load it and return its path.

    It is built once per machine and torch version, which takes about 20 s.

    Raises:
        BuildError: there is no GPU; or the library was not built before, and nvcc is missing, fails or does not know
            this GPU; or the library cannot be loaded.
    """
    found = library(present_archs())
    open_library(found)
    return found


def library(archs: Sequence[int]) -> Path:
    """Return the library for GPUs of the given compute capabilities; raise BuildError as `load` does."""
    return build_cuda(SOURCE, archs, spills=True)


def present_archs() -> list[int]:
    """Return the compute capabilities of this machine's GPUs, ascending; raise BuildError if there is no GPU."""
    if not torch.cuda.is_available():
        raise BuildError("torch sees no CUDA device")
    found = [torch.cuda.get_device_capability(device) for device in range(torch.cuda.device_count())]
    return sorted({10 * major + minor for major, minor in found})
