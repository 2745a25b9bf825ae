"""Fit the planner to published runs: how fast it says they are, and the shares of the data sheets that make it so.

    python scripts/fit_planner.py            every row: predicted, published, error; and errors on what was left out
    python scripts/fit_planner.py --fit      fits the shares anew first, and prints them

The fit is one set of shares (`megazero/plan/machines.py`, Efficiency) for each kind of device: least squares of the
logarithm of predicted over published, by coordinate descent within plausible bounds, every table weighing the same, so
that 36 rows of one setup do not outvote 10 of ten. A row is never fitted alone. *Left out*: a table's rows, predicted
with shares that were fitted to the other tables of the same device.
"""

import argparse
import csv
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from any folder, uninstalled too

from megazero.plan.compute import SYSTEMS, Software
from megazero.plan.job import Job
from megazero.plan.machines import MACHINES, Efficiency, Machine
from megazero.plan.model import ModelShape
from megazero.plan.states import Bytes
from megazero.plan.time import StepTime, step_time

PUBLISHED = Path(__file__).resolve().parents[1] / "tests/plan/published/throughput.csv"
QUANTITIES: dict[str, Callable[[StepTime, Job, float], float]] = {
    "hfu TFLOP/s": lambda found, job, peak: found.hfu * peak / 1e12,
    "model TFLOP/s": lambda found, job, peak: found.tflops_per_device,
    "seconds": lambda found, job, peak: found.step_s,
    "samples/s": lambda found, job, peak: job.global_batch / found.step_s / job.ranks,
}
# Which shares published rows of a device can tell apart, and between which bounds they are plausible.
FITTED = {
    "v100-32gb": ("matmul", "attention", "memory", "in_node", "cross_node"),
    "a100-80gb": ("matmul", "attention", "memory", "in_node", "cross_node"),
    "h100-80gb": ("matmul", "attention"),
}
BOUNDS = {
    "matmul": (0.3, 0.95),
    "attention": (0.05, 0.6),
    "memory": (0.3, 0.95),
    "in_node": (0.2, 0.9),
    "cross_node": (0.05, 0.9),
}


@dataclass(frozen=True)
class Row:
    """A published figure, and the job that it is of; the fit sees it or not."""

    table: str
    name: str
    machine: str
    job: Job
    software: Software
    quantity: str
    published: float
    fitted: bool

    def predicted(self, machine: Machine) -> float:
        peak = machine.peak(self.job.bytes.parameter)
        assert peak is not None, "a row is in 16 bits"
        return QUANTITIES[self.quantity](step_time(self.job, machine, self.software), self.job, peak)


def rows() -> list[Row]:
    """Return the rows of the published tables."""
    with PUBLISHED.open(encoding="utf-8") as file:
        return [_row(row) for row in csv.DictReader(line for line in file if not line.startswith("#"))]


def _row(row: dict[str, str]) -> Row:
    numbers = {name: int(text) for name, text in row.items() if text.isdigit()}
    hidden, heads = numbers["hidden"], numbers["heads"]
    shape = ModelShape(
        *(numbers["layers"], hidden, heads, heads, 4 * hidden, numbers["vocab"], numbers["seq_len"]),
        learned_positions=True,
        layernorm=True,
        gated=False,
        tied=True,
    )
    same = {name: numbers[name] for name in ("tensor", "pipeline", "chunks", "stage", "micro_batch", "global_batch")}
    yes = {name: bool(numbers[name]) for name in ("sequence", "partition", "offload")}
    data = numbers["devices"] // (numbers["tensor"] * numbers["pipeline"])
    how = {"schedule": row["schedule"], "recompute": row["recompute"], "dropout": row["software"] != "fused"}
    job = Job(shape, Bytes(2, 2, 4), data=data, **same, **yes, **how)
    kind = SYSTEMS[row["software"]]
    return Row(
        row["table"],
        row["row"],
        row["machine"],
        job,
        kind,
        row["quantity"],
        float(row["published"]),
        row["fitted"] == "1",
    )


def fit(chosen: Sequence[Row], machine: Machine) -> Machine:
    """Return the machine with the shares under which these rows come closest."""
    tables = [[row for row in chosen if row.table == table] for table in dict.fromkeys(row.table for row in chosen)]

    def loss(reached: Efficiency) -> float:
        tried = replace(machine, reached=reached)
        return sum(statistics.fmean(_log(row, tried) ** 2 for row in of_table) for of_table in tables)

    best, step = replace(machine.reached, **dict.fromkeys(FITTED[machine.name], 0.5)), 1.25  # begins at no other fit
    least = loss(best)
    while step > 1.005:
        better = False
        for name in FITTED[machine.name]:
            for factor in (step, 1 / step):
                low, high = BOUNDS[name]
                value = min(max(getattr(best, name) * factor, low), high)
                tried = replace(best, **{name: value})
                found = loss(tried)
                if found < least * (1 - 1e-6):
                    best, least, better = tried, found, True
        step = step if better else math.sqrt(step)
    return replace(machine, reached=best)


def _log(row: Row, machine: Machine) -> float:
    return math.log(row.predicted(machine) / row.published)


def errors(chosen: Sequence[Row], machine: Machine) -> list[float]:
    """Return predicted over published, less 1."""
    return [row.predicted(machine) / row.published - 1 for row in chosen]


def of_machine(chosen: Sequence[Row], name: str) -> list[Row]:
    """Return the rows that the fit of a device sees."""
    return [row for row in chosen if row.machine == name and row.fitted]


def left_out(chosen: Sequence[Row]) -> list[tuple[str, str, list[float]]]:
    """Return (device, table, errors) where each table is predicted from the others of its device."""
    found = []
    for name in FITTED:
        own = of_machine(chosen, name)
        for table in dict.fromkeys(row.table for row in own):
            rest = [row for row in own if row.table != table]
            if rest:
                machine = fit(rest, MACHINES[name])
                found.append((name, table, errors([row for row in own if row.table == table], machine)))
    return found


def each_row(machines: dict[str, Machine]) -> list[str]:
    """Return a line for each row."""
    lines = ["| table | row | quantity | published | predicted | error |", "|---|---|---|---|---|---|"]
    for row in rows():
        found = row.predicted(machines[row.machine])
        error = found / row.published - 1
        lines.append(
            f"| {row.table} | {row.name} | {row.quantity} | {row.published:g} | {found:.3g} | {100 * error:+.0f} % |"
        )
    return lines


def summary(machines: dict[str, Machine]) -> list[str]:
    """Return a line for each table, and one for all of them."""
    lines = ["| table | rows | median | worst |", "|---|---|---|---|"]
    every = rows()
    tables = {
        table: [row for row in every if row.table == table] for table in dict.fromkeys(row.table for row in every)
    }
    for table, chosen in [*tables.items(), ("all", every)]:
        found = [abs(row.predicted(machines[row.machine]) / row.published - 1) for row in chosen]
        lines.append(f"| {table} | {len(found)} | {statistics.median(found):.1%} | {max(found):.0%} |")
    return lines


def shares(machines: dict[str, Machine]) -> list[str]:
    """Return a line for each device."""
    names = [field.name for field in fields(Efficiency)]
    lines = [f"| device | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for machine in machines.values():
        values = (getattr(machine.reached, name) for name in names)
        lines.append(f"| {machine.name} | {' | '.join(v if isinstance(v, str) else f'{v:.2f}' for v in values)} |")
    return lines


def skip_output() -> list[str]:
    """Return a line for each table that is left out of a fit."""
    lines = ["| left out | device | median | worst |", "|---|---|---|---|"]
    for device, table, found in left_out(rows()):
        sizes = [abs(error) for error in found]
        lines.append(f"| {table} | {device} | {statistics.median(sizes):.1%} | {max(sizes):.0%} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit the shares anew")
    machines = dict(MACHINES)
    if parser.parse_args().fit:
        machines |= {name: fit(of_machine(rows(), name), MACHINES[name]) for name in FITTED}
    for lines in (shares(machines), summary(machines), skip_output(), each_row(machines)):
        print("\n".join(lines), end="\n\n")


if __name__ == "__main__":
    main()
