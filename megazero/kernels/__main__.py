"""Command that builds the kernels of this machine: `python -m megazero.kernels`.

The first run on a machine compiles them, for seconds to minutes, while all its ranks wait. A job of many ranks runs
this once per node before it starts them (scripts/slurm/train.sbatch).
"""

import sys
import time

import torch

from megazero.kernels import cpu, cuda
from megazero.kernels.build import BuildError


def main() -> int:
    """Build for the CPU, and for the GPUs if there are any; return 1 if one of them cannot be built."""
    code = 0
    for kind, load in (("cpu", cpu.load), ("cuda", cuda.load)):
        if kind == "cuda" and not torch.cuda.is_available():
            continue
        began = time.monotonic()
        try:
            print(f"{kind} kernels: {load()} ({time.monotonic() - began:.1f} s)", flush=True)
        except BuildError as error:
            print(f"{kind} kernels: not built, {error}; runs take the reference instead", file=sys.stderr, flush=True)
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
