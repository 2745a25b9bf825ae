"""Load the library of csrc/cpu.cpp, which implements the operations of `schema` for tensors on the CPU."""

from pathlib import Path

from megazero.kernels.build import build_cpu, open_library

_SOURCE = Path(__file__).parent / "csrc" / "cpu.cpp"


def load() -> Path:
    """Build the library (once per machine and torch version), load it and return its path.

    Raises:
        BuildError: there is no compiler, it failed, or the library cannot be loaded.
    """
    library = build_cpu(_SOURCE)
    open_library(library)
    return library
