"""Say whether two runs of a benchmark agree: how many ratios differ by no more than their intervals allow.

    python scripts/bench/agree.py docs/figures/single.json ANOTHER/docs/figures/single.json

Each file is what a script kept with --save. Rows are those that both files have, without references, which are 1 by
definition. Two ratios agree if the difference of their logarithms is at most sqrt(a^2 + b^2), where a and b are the
half widths of their 95 % intervals: so much do two runs of the same thing differ in 95 of 100 cases. Ends with 1 if
fewer than 95 % of the rows agree.
"""

import argparse
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from any folder, uninstalled too

from scripts.bench.figures import Report, read

WANTED = 0.95
Ratios = dict[tuple[str, str], tuple[float, float]]  # by title and row: the logarithm, the half width of its interval


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs=2, metavar="FILE")
    one, other = (ratios(read(path)) for path in parser.parse_args().runs)
    if not (common := [key for key in one if key in other]):
        parser.error("the files have no row in common")
    apart = [key for key in common if not agree(one[key], other[key])]
    for title, row in apart:
        values = " and ".join(f"{math.exp(run[title, row][0]):.3f}" for run in (one, other))
        print(f"{title}: {row}: {values}")
    share = 1 - len(apart) / len(common)
    print(f"{len(common) - len(apart)} of {len(common)} rows agree ({share:.1%}; {WANTED:.0%} wanted)")
    return int(share < WANTED)


def ratios(reports: list[Report]) -> Ratios:
    """Return the ratios of all reports that have an interval of some width."""
    found: Ratios = {}
    for report in reports:
        for row in report["rows"]:
            low, high = row.get("ci95") or (None, None)
            if low and high and high > low:
                found[report["title"], row["system"]] = math.log(row["ratio"]), math.log(high / low) / 2
    return found


def agree(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Return whether two ratios differ by no more than both intervals allow."""
    return abs(one[0] - other[0]) <= math.hypot(one[1], other[1])


if __name__ == "__main__":
    sys.exit(main())
