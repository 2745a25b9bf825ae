"""The library of csrc/cuda.cu, which implements the operations of `schema` for tensors on NVIDIA GPUs."""

from pathlib import Path

import torch

from megazero.kernels.build import BuildError, build_cuda, open_library

SOURCE = Path(__file__).parent / "csrc" / "cuda.cu"


def load() -> str:
    """Builds the library for the GPUs of this machine (once per machine and torch version, about 20 s) and loads it;
    returns how it came to be, for the log.

    Raises:
        BuildError: no GPU, no nvcc or one that does not know this GPU, it failed, or its library cannot be loaded.
    """
    archs = present_archs()
    open_library(build_cuda(SOURCE, archs))
    return f"built with nvcc for {', '.join(f'sm_{arch}' for arch in archs)}"


def present_archs() -> list[int]:
    """The compute capabilities of this machine's GPUs, ascending; raises BuildError where there is none."""
    if not torch.cuda.is_available():
        raise BuildError("torch sees no CUDA device")
    found = [torch.cuda.get_device_capability(device) for device in range(torch.cuda.device_count())]
    return sorted({10 * major + minor for major, minor in found})
