"""Time what quantises values for their way between ranks, and what brings them back, beside the memory's speed.

    python scripts/bench/quantised.py [--megabytes 256] [--launches 3] [--pairs 21] [--json] [--save]

One process with two threads: the memory's speed is that of a machine, not of a core, and tensors are of the size of a
large unit, which no cache holds. *limit* and the other columns are those of kernels.py: a pass y = x + 1 over the least
bytes that the operation has to read and write. An operation that reads more than it writes can be faster.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from any folder, uninstalled too

from scripts.bench import operations
from scripts.bench.harness import add_options, run

THREADS = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256)
    add_options(parser)
    options = parser.parse_args()
    groups = (operations.quantised_group(dtype, options.megabytes, THREADS) for dtype in operations.DTYPES)
    return run(groups, options)


if __name__ == "__main__":
    sys.exit(main())
