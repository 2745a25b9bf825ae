"""Load the library of csrc/cuda.cu, which implements the operations of `schema` for tensors on NVIDIA GPUs."""

from collections.abc import Sequence
from pathlib import Path

import torch

from megazero.kernels import schema
from megazero.kernels.build import BuildError, build_cuda, open_library

SOURCE = Path(__file__).parent / "csrc" / "cuda.cu"


def load() -> str:
    """Build the library for the GPUs of this machine, load it and run one kernel; return a description for the log.

    It is built once per machine and torch version, which takes about 20 s.

    Raises:
        BuildError: there is no GPU; or the library was not built before, and nvcc is missing, fails or does not know
            this GPU; or the library cannot be loaded or used.
    """
    archs = present_archs()
    found = library(archs)
    open_library(found)
    try:
        start_one(torch.device("cuda"))
    except BuildError as error:  # possibly built by another nvcc
        raise BuildError(f"{error} (to build it again: `rm {found}`)") from None
    return f"built with nvcc for {', '.join(f'sm_{arch}' for arch in archs)}, in {found.parent}"


def library(archs: Sequence[int]) -> Path:
    """Return the library for GPUs of the given compute capabilities; raise BuildError as `load` does."""
    return build_cuda(SOURCE, archs, spills=True)


def start_one(device: torch.device) -> None:
    """Run one kernel of the library on `device`, and check its result.

    Some faults appear only at the first launch, such as a compiler too new for the driver. They must be known before
    the choice of kernels; in the first forward it would be too late.

    Raises:
        BuildError: the kernel does not start, or its result is wrong.
    """
    try:
        x = torch.arange(9, dtype=torch.float32, device=device)
        copy = torch.full_like(x, torch.nan, dtype=torch.bfloat16)
        getattr(torch.ops, schema.NAMESPACE).cast_(copy, x)
        right = torch.equal(copy.float(), x)
    except RuntimeError as error:
        said = (str(error).splitlines() or [""])[0]
        raise BuildError(f"the kernels do not start on {device}: {said[:200]}") from None
    if not right:
        raise BuildError(f"the kernels compute wrong values on {device}: 0 to 8 became {copy.tolist()}")


def present_archs() -> list[int]:
    """Return the compute capabilities of this machine's GPUs, ascending; raise BuildError if there is no GPU."""
    if not torch.cuda.is_available():
        raise BuildError("torch sees no CUDA device")
    found = [torch.cuda.get_device_capability(device) for device in range(torch.cuda.device_count())]
    return sorted({10 * major + minor for major, minor in found})
