"""Fit the planner to published runs, and print its errors on the runs that no fit has seen.

    python scripts/fit_planner.py            the tables of docs/published.md and docs/planning.md, and
                                             docs/figures/published.csv, which it writes
    python scripts/fit_planner.py --fit      first fits the shares and the systems again, and prints them

The fit gives one set of shares (`megazero/plan/machines.yaml`) per kind of device. It is a least-squares fit of
log(predicted / published), by coordinate descent within plausible bounds. All tables have equal weight, so that 36 rows
of one setup do not outweigh 10 rows of ten setups; no row is fitted alone. The numbers of a system
(`megazero/plan/systems.yaml`) are fitted in the same way to rows of that system only, which no device's fit uses.
*Left out*: a table's rows, predicted with shares fitted to the other tables of the same device.

Next to every error is that of a baseline with one number per device: the share of its peak (HFU) at which it does all
FLOPs, fitted to the same rows.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from any folder, also without an installation

from megazero.plan.machines import MACHINES, Efficiency, Machine
from megazero.plan.systems import OURS, SYSTEMS, System
from scripts.published import MEMORY, Row, every_machine, rows

T = TypeVar("T")
# FITTED: the shares that a device's published rows determine; BOUNDS: their plausible range.
EVERY_ROW = Path(__file__).resolve().parents[1] / "docs/figures/published.csv"
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
BY_HAND = (
    "latencies and the 4 us of a launch (`machines.yaml`); prices; 4 % and 800 MiB of a device set aside (`search.py`)",
    "of a system: how it scatters, the sums it runs in parallel with products, the messages it splits (`systems.yaml`)",
    "*attention* 0.4 of *matmul* where a machine file does not say (`machines.py`)",
)


def descend(start: T, loss: Callable[[T], float], names: Sequence[str], moved: Callable[[T, str, float], T]) -> T:
    """Minimise `loss` by coordinate descent from `start`.

    Args:
        moved: (value, name, factor) -> the value with one number multiplied by the factor, within bounds.
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
    """Return the sum over tables of the mean of log(predicted / published)^2."""
    logs: dict[str, list[float]] = {}
    for row in chosen:
        logs.setdefault(row.table, []).append(math.log(row.predicted(machine, system) / row.published) ** 2)
    return sum(statistics.fmean(squares) for squares in logs.values())


def fit(chosen: Sequence[Row], machine: Machine) -> Machine:
    """Return the machine with its shares fitted to these rows."""

    def moved(reached: Efficiency, name: str, factor: float) -> Efficiency:
        return replace(reached, **{name: _bounded(name, getattr(reached, name) * factor)})

    names = FITTED[machine.name]
    start = replace(machine.reached, **dict.fromkeys(names, 0.5))  # does not start at an earlier fit
    return replace(
        machine, reached=descend(start, lambda it: _loss(chosen, replace(machine, reached=it)), names, moved)
    )


def fit_systems(chosen: Sequence[Row], machines: Mapping[str, Machine]) -> dict[str, System]:
    """Return the systems with their numbers fitted to their own rows."""
    core, device = SYSTEMS["megatron-core"], "h100-80gb"
    own = [row for row in chosen if row.fitted and row.system == core and row.machine == device]

    def at(matmul: float) -> System:
        return replace(core, reached={device: {**core.reached[device], "matmul": _bounded("matmul", matmul)}})

    best = descend(
        at(0.5),
        lambda system: _loss(own, machines[device], system),
        ["matmul"],
        lambda system, name, factor: at(system.reached[device][name] * factor),
    )
    memory = [row for row in chosen if row.quantity == MEMORY]
    return {**SYSTEMS, core.name: best, "deepspeed": fit_allocator(memory, machines["a100-80gb"])}


def fit_allocator(chosen: Sequence[Row], machine: Machine) -> System:
    """Return DeepSpeed with its allocator share fitted to these memory rows."""
    return descend(
        replace(SYSTEMS["deepspeed"], allocator=0.1),
        lambda system: _loss(chosen, machine, system),
        ["allocator"],
        lambda system, name, factor: replace(system, allocator=_bounded(name, system.allocator * factor)),
    )


def of_machine(chosen: Sequence[Row], name: str) -> list[Row]:
    """Return the rows that the fit of a device uses."""
    timed = [row for row in chosen if row.quantity != MEMORY and not row.own_kernels]
    return [row for row in timed if row.machine == name and row.fitted]


def left_out(chosen: Sequence[Row]) -> list[tuple[str, str, list[float]]]:
    """Return (device, table, relative errors), each table predicted with a fit to the others of its device."""
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
    """Return the baseline HFU of each device, fitted to the rows that any fit of the device uses."""
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


def _table(heads: str, rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a table; a cell may contain " | " and then fills several columns."""
    return [
        f"| {heads} |",
        f"|{'---|' * (heads.count(' | ') + 1)}",
        *(f"| {' | '.join(map(str, row))} |" for row in rows),
    ]


def _by_table(chosen: Sequence[Row], together: str) -> Iterator[tuple[str, Sequence[Row]]]:
    """Yield the rows of each table, and all of them under the name `together`."""
    for table in dict.fromkeys(row.table for row in chosen):
        yield table, [row for row in chosen if row.table == table]
    yield together, chosen


def _errors(groups: Sequence[tuple[str, Sequence[Row]]], machines: Mapping[str, Machine]) -> list[str]:
    known = every_machine(machines)
    hfu = constant_hfu(rows(), known)
    ways: tuple[Callable[[Row], float], ...] = (
        lambda row: row.predicted(known[row.machine]),
        lambda row: row.predicted(known[row.machine], OURS),
        lambda row: row.at_hfu(hfu[row.machine], known[row.machine]),
    )
    return _table(
        "table | rows | as its system ran: median | worst | as ours: median | worst | one HFU: median | worst",
        ((name, len(some), *(_cells(_sizes(some, way)) for way in ways)) for name, some in groups),
    )


def unseen(chosen: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Return the time rows that no fit has seen: those of unseen tables, and those of tables seen in part."""
    timed = [row for row in chosen if row.quantity != MEMORY]
    known = {row.table for row in timed if row.fitted}
    whole = [row for row in timed if row.table not in known]
    return whole, [row for row in timed if row.table in known and not row.fitted]


def never_seen(machines: Mapping[str, Machine]) -> list[str]:
    """Return the table of time errors on the rows that no fit has seen."""
    whole, others = unseen(rows())
    groups = [*_by_table(whole, "*whole tables*"), *_by_table(others, "*rows of tables seen in part*")]
    return _errors([*groups, ("*all*", [*whole, *others])], machines)


def seen(machines: Mapping[str, Machine]) -> list[str]:
    """Return the table of time errors on the rows that a fit has seen."""
    chosen = [row for row in rows() if row.fitted and row.quantity != MEMORY]
    return _errors(list(_by_table(chosen, "*all*")), machines)


def in_memory(machines: Mapping[str, Machine]) -> list[str]:
    """Return the table of memory errors; *left out*: with the allocator share fitted to the other tables."""
    every, machine = [row for row in rows() if row.quantity == MEMORY], machines["a100-80gb"]
    lines = []
    for table in dict.fromkeys(row.table for row in every):
        some = [row for row in every if row.table == table]
        ways = (None, fit_allocator([row for row in every if row.table != table], machine), OURS)
        sizes = ([abs(row.predicted(machine, way) / row.published - 1) for row in some] for way in ways)
        lines.append((table, len(some), *map(_cells, sizes)))
    heads = "table | rows | as its system ran: median | worst | left out: median | worst | as ours: median | worst"
    return _table(heads, lines)


def constants(machines: Mapping[str, Machine]) -> list[str]:
    """Return lines that say which numbers were set by hand, and which are at the bounds of their fit."""
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
    """Return the lines of docs/figures/published.csv, one per row; rows that no fit has seen come first."""
    known = every_machine(machines)
    lines = ["table,row,seen,quantity,published,predicted,error"]
    for row in sorted(rows(), key=lambda row: row.fitted):
        found = row.predicted(known[row.machine])
        cells = (row.table, row.name, "yes" if row.fitted else "no", row.quantity, f"{row.published:g}")
        cells = (*cells, f"{found:.3g}", f"{100 * (found / row.published - 1):+.0f} %")
        lines.append(",".join(f'"{cell}"' if "," in cell else cell for cell in cells))
    return lines


def shares(machines: Mapping[str, Machine]) -> list[str]:
    """Return the table of shares, one row per device."""
    names = [field.name for field in fields(Efficiency)]
    rows = ([getattr(machine.reached, name) for name in names] for machine in machines.values())
    cells = ((v if isinstance(v, str) else f"{v:.2f}" for v in row) for row in rows)
    return _table(" | ".join(["device", *names]), ((name, *row) for name, row in zip(machines, cells, strict=True)))


def skip_output() -> list[str]:
    """Return the table of errors on tables that were left out of a fit."""
    found = ((table, device, _cells([abs(error) for error in errors])) for device, table, errors in left_out(rows()))
    return _table("left out | device | median | worst", found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit the shares again")
    machines = dict(MACHINES)
    if parser.parse_args().fit:
        machines |= {name: fit(of_machine(rows(), name), MACHINES[name]) for name in FITTED}
        for system in fit_systems(rows(), machines).values():
            print(f"{system.name}: reached {dict(system.reached)}, allocator {system.allocator:.3f}")
    for lines in (shares, never_seen, seen, in_memory, constants):
        print("\n".join(lines(machines)), end="\n\n")
    print("\n".join(skip_output()), end="\n\n")
    EVERY_ROW.write_text("\n".join(each_row(machines)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
