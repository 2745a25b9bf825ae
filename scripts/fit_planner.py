"""Fit the planner to published runs, and print how far it is from those that no fit has seen.

    python scripts/fit_planner.py            the tables of docs/published.md and docs/planning.md
    python scripts/fit_planner.py --fit      fits the shares and the systems anew first, and prints them

The fit is one set of shares (`megazero/plan/machines.yaml`) for each kind of device: least squares of the
logarithm of predicted over published, by coordinate descent within plausible bounds, every table weighing the same, so
that 36 rows of one setup do not outvote 10 of ten. A row is never fitted alone. Numbers of a system
(`megazero/plan/systems.yaml`) are fitted in the same way to rows of that system alone, which no device's fit sees.
*Left out*: a table's rows, predicted with shares that were fitted to the other tables of the same device.

Beside every error stands that of a baseline: one number for each device, the share of its peak at which all FLOPs are
done (HFU), fitted to the same rows.
"""

import argparse
import csv
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from any folder, uninstalled too

from megazero.plan.compute import Compute
from megazero.plan.job import Job
from megazero.plan.machines import MACHINES, Efficiency, Machine
from megazero.plan.model import Shape
from megazero.plan.states import Bytes
from megazero.plan.systems import OURS, SYSTEMS, System
from megazero.plan.time import StepTime, step_time

T = TypeVar("T")
FOLDER = Path(__file__).resolve().parents[1] / "tests/plan/published"
FILES = ("throughput.csv", "systems.csv")
MEMORY = "memory GiB"
CONTEXT = 1573 / 1024  # GiB of CUDA's own, which nvidia-smi counts and the planner sets aside: BigScience's log
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
    "allocator": (0.0, 0.5),
}
# Which shares of which device rows of a system tell apart.
SYSTEM_FITTED = {"megatron-core": ("h100-80gb", ("matmul",))}
BY_HAND = (
    "latencies and the 4 us of a launch (`machines.yaml`); prices; 4 % and 800 MiB of a device set aside (`search.py`)",
    "for a system `scattered`, which sums have products beside them, which messages are split (`systems.py`)",
    "*attention* 0.4 of *matmul* where a machine file does not say (`machines.py`)",
)


@dataclass(frozen=True)
class Row:
    """A published figure, and the job that it is of; a fit sees it or not."""

    table: str
    name: str
    machine: str
    job: Job
    system: System
    quantity: str
    published: float
    fitted: bool

    @property
    def own_kernels(self) -> bool:
        """Return whether its system has shares of its own on this device, so that the device's fit does not see it."""
        return self.machine in self.system.reached

    def predicted(self, machine: Machine, system: System | None = None) -> float:
        """Return what the planner says, of its own system or of another."""
        system = system or self.system
        if self.quantity == MEMORY:
            ends = {0, self.job.pipeline - 1}
            return max(system.memory(self.job, rank).peak for rank in ends) / 2**30 + CONTEXT
        peak = machine.peak(self.job.bytes.parameter)
        assert peak is not None, "a row is in 16 bits"
        return QUANTITIES[self.quantity](step_time(self.job, machine, system), self.job, peak)

    def at_hfu(self, hfu: float, machine: Machine) -> float:
        """Return what the baseline says: all FLOPs of the step at one share of the peak."""
        compute = Compute(self.job, machine, self.system)
        model, done = compute.flops()
        tokens = self.job.global_batch * self.job.shape.seq_len / self.job.ranks
        seconds = tokens * done / (hfu * compute.peak)
        rates = {"hfu TFLOP/s": done, "model TFLOP/s": model}
        if self.quantity in rates:
            return tokens * rates[self.quantity] / seconds / 1e12
        return seconds if self.quantity == "seconds" else tokens / self.job.shape.seq_len / seconds


def rows() -> list[Row]:
    """Return the rows of the published tables."""
    found = []
    for name in FILES:
        with (FOLDER / name).open(encoding="utf-8") as file:
            found += [_row(row) for row in csv.DictReader(line for line in file if not line.startswith("#"))]
    return found


def _row(row: dict[str, str]) -> Row:
    numbers = {name: int(text) for name, text in row.items() if text.isdigit()}
    hidden, heads = numbers["hidden"], numbers["heads"]
    newer = "kv_heads" in numbers
    shape = Shape(
        *(numbers["layers"], hidden, heads, numbers.get("kv_heads", heads), 4 * hidden),
        *(numbers["vocab"], numbers["seq_len"]),
        position="rotary" if newer else "learned",
        dropout=0.0 if row["software"] in ("fsdp", "megatron-core") else 0.1,
        tie_embeddings=not newer,
    )
    same = {name: numbers[name] for name in ("tensor", "pipeline", "chunks", "stage", "micro_batch", "global_batch")}
    yes = {name: bool(numbers[name]) for name in ("sequence", "partition")}
    data = numbers["devices"] // (numbers["tensor"] * numbers["pipeline"])
    how: dict[str, Any] = {
        "schedule": row["schedule"],
        "recompute": row["recompute"],
        "offload": "cpu" if numbers["offload"] else "none",
    }
    job = Job(shape, Bytes(2, numbers.get("gradient", 2), 4), data=data, **same, **yes, **how)
    what = (row["quantity"], float(row["published"]), row["fitted"] == "1")
    return Row(row["table"], row["row"], row["machine"], job, SYSTEMS[row["software"]], *what)


def every_machine(machines: Mapping[str, Machine]) -> dict[str, Machine]:
    """Return the machines with those of rows that no plan is asked for: the A100 with 40 GB, its shares the 80 GB's."""
    small = {"memory_bytes": 40 * 2**30, "memory_bandwidth": 1555e9}  # NVIDIA A100 data sheet, Jun 2021, SXM
    return {**machines, "a100-40gb": replace(machines["a100-80gb"], name="a100-40gb", **small)}


def descend(start: T, loss: Callable[[T], float], names: Sequence[str], moved: Callable[[T, str, float], T]) -> T:
    """Return where coordinate descent from `start` ends.

    Args:
        moved: returns a value with one number times a factor, within bounds.
    """
    best, least, step = start, loss(start), 1.25
    while step > 1.005:
        better = False
        for name in names:
            for factor in (step, 1 / step):
                tried = moved(best, name, factor)
                found = loss(tried)
                if found < least * (1 - 1e-6):
                    best, least, better = tried, found, True
        step = step if better else math.sqrt(step)
    return best


def _bounded(name: str, value: float) -> float:
    low, high = BOUNDS[name]
    return min(max(value, low), high)


def _loss(chosen: Sequence[Row], machine: Machine, system: System | None = None) -> float:
    """Return the sum over tables of the mean squared logarithm of predicted over published."""
    logs: dict[str, list[float]] = {}
    for row in chosen:
        logs.setdefault(row.table, []).append(math.log(row.predicted(machine, system) / row.published) ** 2)
    return sum(statistics.fmean(squares) for squares in logs.values())


def fit(chosen: Sequence[Row], machine: Machine) -> Machine:
    """Return the machine with the shares under which these rows come closest."""

    def moved(reached: Efficiency, name: str, factor: float) -> Efficiency:
        return replace(reached, **{name: _bounded(name, getattr(reached, name) * factor)})

    names = FITTED[machine.name]
    start = replace(machine.reached, **dict.fromkeys(names, 0.5))  # begins at no other fit
    return replace(
        machine, reached=descend(start, lambda it: _loss(chosen, replace(machine, reached=it)), names, moved)
    )


def fit_systems(chosen: Sequence[Row], machines: Mapping[str, Machine]) -> dict[str, System]:
    """Return the systems with the numbers under which rows of their own come closest."""
    found = dict(SYSTEMS)
    for name, (device, shares) in SYSTEM_FITTED.items():
        own = [row for row in chosen if row.fitted and row.system.name == name and row.machine == device]

        def moved(system: System, share: str, factor: float, device: str = device) -> System:
            changed = {share: _bounded(share, system.reached[device][share] * factor)}
            return replace(system, reached={device: {**system.reached[device], **changed}})

        start = replace(
            SYSTEMS[name], reached={device: {**SYSTEMS[name].reached[device], **dict.fromkeys(shares, 0.5)}}
        )
        loss = lambda system, own=own, device=device: _loss(own, machines[device], system)  # noqa: E731
        found[name] = descend(start, loss, shares, moved)
    found["deepspeed"] = fit_allocator([row for row in chosen if row.quantity == MEMORY], machines["a100-80gb"])
    return found


def fit_allocator(chosen: Sequence[Row], machine: Machine) -> System:
    """Return DeepSpeed with the share of the allocator under which these rows of memory come closest."""
    return descend(
        replace(SYSTEMS["deepspeed"], allocator=0.1),
        lambda system: _loss(chosen, machine, system),
        ["allocator"],
        lambda system, name, factor: replace(system, allocator=_bounded(name, system.allocator * factor)),
    )


def of_machine(chosen: Sequence[Row], name: str) -> list[Row]:
    """Return the rows that the fit of a device sees."""
    timed = [row for row in chosen if row.quantity != MEMORY and not row.own_kernels]
    return [row for row in timed if row.machine == name and row.fitted]


def left_out(chosen: Sequence[Row]) -> list[tuple[str, str, list[float]]]:
    """Return (device, table, errors) where each table is predicted from the others of its device."""
    found = []
    for name in FITTED:
        own = of_machine(chosen, name)
        for table in dict.fromkeys(row.table for row in own):
            rest = [row for row in own if row.table != table]
            if rest:
                machine = fit(rest, MACHINES[name])
                errors = [row.predicted(machine) / row.published - 1 for row in own if row.table == table]
                found.append((name, table, errors))
    return found


def constant_hfu(chosen: Sequence[Row], machines: Mapping[str, Machine]) -> dict[str, float]:
    """Return the baseline's number of each device, fitted to the rows that any fit of it sees."""
    found = {}
    for name in FITTED:
        logs: dict[str, list[float]] = {}
        for row in chosen:
            if row.machine == name and row.fitted and row.quantity != MEMORY:
                over = row.at_hfu(1.0, machines[name]) / row.published
                logs.setdefault(row.table, []).append(math.log(over) * (1 if row.quantity == "seconds" else -1))
        found[name] = math.exp(statistics.fmean(statistics.fmean(each) for each in logs.values()))
    return {**found, "a100-40gb": found["a100-80gb"]}


def _sizes(chosen: Sequence[Row], predicted: Callable[[Row], float]) -> list[float]:
    return [abs(predicted(row) / row.published - 1) for row in chosen]


def _cells(sizes: Sequence[float]) -> str:
    return f"{statistics.median(sizes):.1%} | {max(sizes):.0%}"


def _by_table(chosen: Sequence[Row], together: str) -> Iterator[tuple[str, Sequence[Row]]]:
    """Yield the rows of each table, and all of them under the name `together`."""
    for table in dict.fromkeys(row.table for row in chosen):
        yield table, [row for row in chosen if row.table == table]
    yield together, chosen


def _errors(groups: Sequence[tuple[str, Sequence[Row]]], machines: Mapping[str, Machine]) -> list[str]:
    known = every_machine(machines)
    hfu = constant_hfu(rows(), known)
    top = "| table | rows | as its system ran: median | worst | as ours: median | worst | one HFU: median | worst |"
    lines = [top, "|---|---|---|---|---|---|---|---|"]
    for name, some in groups:
        own = _cells(_sizes(some, lambda row: row.predicted(known[row.machine])))
        ours = _cells(_sizes(some, lambda row: row.predicted(known[row.machine], OURS)))
        base = _cells(_sizes(some, lambda row: row.at_hfu(hfu[row.machine], known[row.machine])))
        lines.append(f"| {name} | {len(some)} | {own} | {ours} | {base} |")
    return lines


def unseen(chosen: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Return the rows of time that no fit has seen: those of whole tables, and those of tables that it saw some of."""
    timed = [row for row in chosen if row.quantity != MEMORY]
    known = {row.table for row in timed if row.fitted}
    whole = [row for row in timed if row.table not in known]
    return whole, [row for row in timed if row.table in known and not row.fitted]


def never_seen(machines: Mapping[str, Machine]) -> list[str]:
    """Return a line for each table with rows that no fit has seen, of those rows: errors of the time."""
    whole, others = unseen(rows())
    groups = [*_by_table(whole, "*whole tables*"), *_by_table(others, "*rows of tables seen in part*")]
    return _errors([*groups, ("*all*", [*whole, *others])], machines)


def seen(machines: Mapping[str, Machine]) -> list[str]:
    """Return a line for each table with rows that a fit saw, of those rows: errors of the time."""
    chosen = [row for row in rows() if row.fitted and row.quantity != MEMORY]
    return _errors(list(_by_table(chosen, "*all*")), machines)


def in_memory(machines: Mapping[str, Machine]) -> list[str]:
    """Return a line for each table of memory; *left out*: with the allocator's share fitted to the other table."""
    top = "| table | rows | as its system ran: median | worst | left out: median | worst | as ours: median | worst |"
    lines = [top, "|---|---|---|---|---|---|---|---|"]
    every, machine = [row for row in rows() if row.quantity == MEMORY], machines["a100-80gb"]
    for table in dict.fromkeys(row.table for row in every):
        some = [row for row in every if row.table == table]
        other = fit_allocator([row for row in every if row.table != table], machine)
        cells = [
            _cells(_sizes(some, lambda row, system=system: row.predicted(machine, system)))
            for system in (None, other, OURS)
        ]
        lines.append(f"| {table} | {len(some)} | {' | '.join(cells)} |")
    return lines


def constants(machines: Mapping[str, Machine]) -> list[str]:
    """Return which numbers were set by hand, and which lie on the bounds of their fit."""
    names = [field.name for field in fields(Efficiency) if field.name != "fitted"]
    lines = []
    for device, free in FITTED.items():
        reached = machines[device].reached
        by_hand = [f"*{name}* {getattr(reached, name):.2f}" for name in names if name not in free]
        values = [(name, getattr(reached, name)) for name in free]
        bound = [f"*{name}* {value:.2f}" for name, value in values if min(abs(value - b) for b in BOUNDS[name]) < 0.005]
        lines.append(f"- {device}: by hand {', '.join(by_hand)}; on a bound {', '.join(bound) or 'none'}.")
    rest = ", ".join(device for device in machines if device not in FITTED)
    lines.append(f"- {rest}: by hand, every share is that of the h100-80gb.")
    return [*lines, *(f"- By hand: {words}." for words in BY_HAND)]


def each_row(machines: Mapping[str, Machine]) -> list[str]:
    """Return a line for each row; those that no fit has seen first."""
    known = every_machine(machines)
    lines = ["| table | row | seen | quantity | published | predicted | error |", "|---|---|---|---|---|---|---|"]
    for row in sorted(rows(), key=lambda row: row.fitted):
        found = row.predicted(known[row.machine])
        cells = (row.table, row.name, "yes" if row.fitted else "no", row.quantity, f"{row.published:g}")
        lines.append(f"| {' | '.join(cells)} | {found:.3g} | {100 * (found / row.published - 1):+.0f} % |")
    return lines


def shares(machines: Mapping[str, Machine]) -> list[str]:
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
        lines.append(f"| {table} | {device} | {_cells([abs(error) for error in found])} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit the shares anew")
    machines = dict(MACHINES)
    if parser.parse_args().fit:
        machines |= {name: fit(of_machine(rows(), name), MACHINES[name]) for name in FITTED}
        for system in fit_systems(rows(), machines).values():
            print(f"{system.name}: reached {dict(system.reached)}, allocator {system.allocator:.3f}")
    for lines in (shares, never_seen, seen, in_memory, constants):
        print("\n".join(lines(machines)), end="\n\n")
    print("\n".join(skip_output()), end="\n\n")
    print("\n".join(each_row(machines)))


if __name__ == "__main__":
    main()
