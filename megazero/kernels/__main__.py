"""Command that builds the kernels of this machine: `python -m megazero.kernels`.

The first run on a machine compiles them, for seconds to minutes, while all its ranks wait. A job of many ranks runs
this once per node before it starts them (scripts/slurm/train.sbatch).

    python -m megazero.kernels --registers      # of every CUDA kernel, on each architecture of a release; needs no GPU
"""

import argparse
import sys
import time

import torch

from megazero.kernels import cpu, cuda, ptxas
from megazero.kernels.build import BuildError, build_cuda, compiler_report, find_nvcc, release_archs


def main() -> int:
    """Build for the CPU, and for the GPUs if there are any; return 1 if one of them cannot be built."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--registers", action="store_true", help="print registers and spills of the CUDA kernels")
    if parser.parse_args().registers:
        return registers()
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


def registers() -> int:
    """Print what ptxas reports of each CUDA kernel; return 1 if the kernels cannot be built."""
    try:
        print("compiling for every architecture of a release: some minutes", file=sys.stderr, flush=True)
        library = build_cuda(cuda.SOURCE, release_archs(find_nvcc()), spills=True)
    except BuildError as error:
        print(f"cuda kernels: not built, {error}", file=sys.stderr, flush=True)
        return 1
    print(ptxas.table(ptxas.resources(compiler_report(library))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
