"""Train the quickstart with several learning rates, optimizers and seeds; compare the bits per byte of validation.

    python scripts/bench/rates.py [--runs runs/rates] [--seeds 3] [--json] [--save]

A run takes 7 minutes of one core. Runs that are whole in the folder --runs are not trained again, so the script goes on
where it was stopped. The second table has the share of AdamW's steps after which Muon's validation, interpolated
between two of them, is as good as AdamW's after its last step, with the same seed. The third compares a bf16 run with
one that keeps no masters, and its moments in bf16, with the first two seeds. --save also draws docs/pictures/rates.svg.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from any folder, also without an installation

from megazero.base.picture import picture
from megazero.config.file import load
from megazero.observe.jsonl import read_rows
from scripts.bench.figures import ROOT, Report, report_of, tell

RATES = ("1e-3", "3e-3", "6e-3", "1.2e-2", "2.4e-2", "4.8e-2")
OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon"}
NARROW = {
    "bf16": ["precision.dtype=bf16"],
    "narrow": ["precision.dtype=bf16", "precision.masters=none", "optimizer.moments=bf16"],
}
NARROW_SEEDS = (1, 2)
METRIC = "valid_bits_per_byte"
Curve = list[tuple[int, float]]  # (step, bits per byte) of each validation


@dataclass(frozen=True)
class Runs:
    """The validations of the runs in a folder."""

    folder: Path
    seeds: Sequence[int]
    last: int

    def of(self, name: str) -> list[Curve]:
        """Return the curve of each seed."""
        return [self.curve(f"{name}_{seed}") for seed in self.seeds if name not in NARROW or seed in NARROW_SEEDS]

    def final(self, name: str) -> list[float]:
        """Return the bits per byte after the last step, of each seed."""
        return [curve[-1][1] for curve in self.of(name)]

    def curve(self, run: str) -> Curve:
        """Return the validations of one run; none if it is not whole."""
        path = self.folder / run / "metrics.jsonl"
        rows = read_rows(path) if path.exists() else []
        found = [(row["step"], row[METRIC]) for row in rows if METRIC in row]
        return found if found and found[-1][0] == self.last else []

    def train(self) -> None:
        """Train the runs that are not whole, one after the other."""
        for run, overrides in wanted(self.seeds):
            if not self.curve(run):
                print(f"training {run}", flush=True)
                command = ["env", "OMP_NUM_THREADS=1", sys.executable, "train.py", "--config", "quickstart"]
                command += [f"run.dir={self.folder / run}", *overrides]
                subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs/rates", help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--save", action="store_true", help="keep the figures in docs")
    options = parser.parse_args()
    config = load("quickstart")
    runs = Runs(options.runs.resolve(), range(1, options.seeds + 1), config.run.steps)
    runs.train()
    if options.save:
        draw(runs, ROOT / "docs/pictures/rates.svg")
    return tell(
        reports(runs, f"{config.optimizer.lr:.0e}".replace("e-0", "e-")), as_json=options.json, save=options.save
    )


def wanted(seeds: Sequence[int]) -> Iterator[tuple[str, list[str]]]:
    """Yield each run's name and options."""
    for seed in seeds:
        for name in OPTIMIZERS:
            for rate in RATES:
                yield f"{name}_{rate}_{seed}", [f"run.seed={seed}", f"optimizer.lr={rate}", f"optimizer.name={name}"]
        for name, options in NARROW.items() if seed in NARROW_SEEDS else ():
            yield f"{name}_{seed}", [f"run.seed={seed}", *options]


def reports(runs: Runs, shipped: str) -> Iterator[Report]:
    """Yield the tables."""
    rows = []
    for rate in RATES:
        columns: dict[str, float] = {}
        for name, head in OPTIMIZERS.items():
            found = [1000 * bits for bits in runs.final(f"{name}_{rate}")]
            columns |= {head: mean(found), f"{head}, largest - smallest": max(found) - min(found)}
        rows.append({"system": f"learning rate {rate}", "columns": columns})
    yield report_of("bits of 1,000 bytes", rows, launches=len(runs.seeds))
    best = {name: best_rate(runs, name) for name in OPTIMIZERS}
    pairs = {"best rates": best, f"the shipped rate, {shipped}": dict.fromkeys(OPTIMIZERS, shipped)}
    rows = []
    for system, of in pairs.items():
        curves = zip(*(runs.of(f"{name}_{rate}") for name, rate in of.items()), strict=True)
        shares = [reached(muon, adamw[-1][1]) / runs.last for adamw, muon in curves]
        columns = {"share of AdamW's steps": mean(shares), "smallest": min(shares), "largest": max(shares)}
        rows.append({"system": f"{system}: " + ", ".join(of.values()), "columns": columns})
    yield report_of("steps of Muon to the result of AdamW", rows, launches=len(runs.seeds))
    rows = []
    for name, options in NARROW.items():
        found, wide = runs.final(name), runs.final("bf16")
        above = [100 * (bits / other - 1) for bits, other in zip(found, wide, strict=True)]
        columns = {"bits of 1,000 bytes": 1000 * mean(found), "% above": mean(above), "at most": max(above)}
        rows.append({"system": " ".join(options), "columns": columns})
    yield report_of("state in 16 bits", rows, launches=len(runs.of("narrow")))


def best_rate(runs: Runs, name: str) -> str:
    """Return the rate with the lowest mean bits per byte."""
    return min(RATES, key=lambda rate: mean(runs.final(f"{name}_{rate}")))


def reached(curve: Curve, goal: float) -> float:
    """Return the step at which a curve, linear between its points, first comes down to a value; inf: never."""
    for (first, above), (then, below) in pairwise(curve):
        if below <= goal < above:
            return first + (then - first) * (above - goal) / (above - below)
    return curve[0][0] if curve[0][1] <= goal else float("inf")


def draw(runs: Runs, path: Path) -> None:
    """Draw the results over the learning rates, and the validations of the best rates."""
    with picture(path, 9, 3.6) as figure:
        over_rates, over_steps = figure.subplots(1, 2)
        for (name, head), colour in zip(OPTIMIZERS.items(), ("#4878a8", "#c05a3c"), strict=True):
            final = [runs.final(f"{name}_{rate}") for rate in RATES]
            lows, means = [min(each) for each in final], [mean(each) for each in final]
            bars = [[m - low for m, low in zip(means, lows, strict=True)]]
            bars.append([max(each) - m for each, m in zip(final, means, strict=True)])
            over_rates.errorbar([*map(float, RATES)], means, bars, fmt="o-", color=colour, capsize=3, label=head)
            rate = best_rate(runs, name)
            for number, curve in enumerate(runs.of(f"{name}_{rate}")):
                label = None if number else f"{head}, {rate}"
                over_steps.plot(*zip(*curve, strict=True), "o-", color=colour, markersize=3, linewidth=1, label=label)
        over_rates.set_xscale("log")
        over_rates.set_xlabel("learning rate")
        over_steps.set_xlabel("step")
        for axes in (over_rates, over_steps):
            axes.set_ylabel("validation, bits per byte")
            axes.grid(color="#e3e3e3", linewidth=0.6)
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(frameon=False)


if __name__ == "__main__":
    sys.exit(main())
