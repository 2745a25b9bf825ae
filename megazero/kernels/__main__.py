"""Command that builds the kernels of this machine: `python -m megazero.kernels`; or of other ones' GPUs: `... 80 90`.

The first run on a machine compiles them, for seconds to minutes, while all its ranks wait. A job of many ranks runs
this once per node before it starts them (scripts/slurm/train.sbatch). Where the nodes have no compiler, run it with the
GPUs' compute capabilities where there is one, and copy the libraries (docs/kernels.md).
"""

import sys
import time
from collections.abc import Callable, Iterator

import torch

from megazero.kernels import cpu, cuda
from megazero.kernels.build import BuildError


def main(arguments: list[str]) -> int:
    """Build for the CPU, and for the GPUs that are here or that `arguments` name; return 1 if something is not built.

    Raises:
        SystemExit: 2, an argument is no compute capability.
    """
    if wrong := [word for word in arguments if not word.isdigit()]:
        print(f"expected compute capabilities such as 90, got {wrong[0]}", file=sys.stderr)
        raise SystemExit(2)
    code = 0
    for kind, load in _builders([int(word) for word in arguments]):
        began = time.monotonic()
        try:
            print(f"{kind} kernels: {load()} ({time.monotonic() - began:.1f} s)", flush=True)
        except BuildError as error:
            print(f"{kind} kernels: not built, {error}; runs take the reference instead", file=sys.stderr, flush=True)
            code = 1
    return code


def _builders(archs: list[int]) -> Iterator[tuple[str, Callable[[], object]]]:
    yield "cpu", cpu.load
    if archs:
        yield "cuda", lambda: cuda.library(archs)
    elif torch.cuda.is_available():
        yield "cuda", cuda.load


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
