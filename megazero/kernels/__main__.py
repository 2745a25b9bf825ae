"""Command that builds the kernels of this machine: `python -m megazero.kernels`.

The first run on a machine compiles them, for seconds to minutes, while all its ranks wait. A job of many ranks runs
this once per node before it starts them (scripts/slurm/train.sbatch).

    python -m megazero.kernels --archs 80 90    # for such GPUs, not those that are here: to be copied to their hosts
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence

import torch

from megazero.kernels import cpu, cuda
from megazero.kernels.build import BuildError


def main(arguments: Sequence[str] = ()) -> int:
    """Build the kernels for the CPU and for the named or present GPUs; return 1 if a build fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archs", type=int, nargs="+", metavar="ARCH", help="compute capabilities, such as 90 for 9.0")
    options = parser.parse_args(arguments)
    builders: dict[str, Callable[[], object]] = {"cpu": cpu.load}
    if options.archs:
        builders["cuda"] = lambda: cuda.library(options.archs)
    elif torch.cuda.is_available():
        builders["cuda"] = cuda.load
    code = 0
    for kind, load in builders.items():
        began = time.monotonic()
        try:
            print(f"{kind} kernels: {load()} ({time.monotonic() - began:.1f} s)", flush=True)
        except BuildError as error:
            print(f"{kind} kernels: not built, {error}; runs use the reference instead", file=sys.stderr, flush=True)
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
