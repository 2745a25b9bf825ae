"""The library of csrc/cpu.cpp, which implements the operations of `schema` for tensors on the CPU."""

from functools import cache
from pathlib import Path

import torch

from megazero.kernels.build import BuildError, build_cpu

_SOURCE = Path(__file__).parent / "csrc" / "cpu.cpp"


def load() -> str:
    """Builds the library (once per machine and torch version) and loads it; returns how it came to be, for the log.

    Raises:
        BuildError: no compiler, it failed, or its library cannot be loaded.
    """
    _load(build_cpu(_SOURCE))
    return "built with g++"


@cache
def _load(library: Path) -> None:
    try:
        torch.ops.load_library(library)
    except OSError as error:  # a cache on a file system that forbids execution, say
        raise BuildError(f"{library} cannot be loaded: {error.__cause__ or error}") from None
