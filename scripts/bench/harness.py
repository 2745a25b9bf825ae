"""Time systems side by side: in launches, which start all processes, and rounds, in which each system does one step.

A script gives groups of systems, each with its reference and small enough to fit into memory. A launch starts all
processes of a group again. In a round of a launch every system does one step, one system at a time, in random order.
Every group has its reference twice: the difference of the second copy's ratio from 1 is noise. `times.py` explains the
ratios and their intervals. No round is discarded; the notes of a table give the share of the machine's processors that
other processes took.

Systems that train from the same weights on the same tokens return losses. The notes also give the largest difference
between the first group's first system and any other, over all groups, launches and common steps.
"""

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from scripts.bench import figures
from scripts.bench.processes import Memory, Running, System, running
from scripts.bench.times import Ratio, Rounds, ratio, seconds, spread

WARM_UP = 2  # steps before the first round of a launch
LAUNCHES, ROUNDS = 3, 7  # launches of a group; rounds per launch
AGAIN = ", again"  # after the name of a reference's second copy


@dataclass(frozen=True)
class Pair:
    """A row of a table: the ratio of one call's time to another's.

    Attributes:
        row: name of the row.
        call, reference: names of calls.
        divide_by: see `times.ratio`.
        bound: the least ratio that theory allows.
    """

    row: str
    call: str
    reference: str
    divide_by: int = 1
    bound: float | None = None


@dataclass(frozen=True)
class Group:
    """Systems that run side by side.

    Attributes:
        title: title of the table.
        systems: the first is the reference.
        divide_by: see `times.ratio`.
        pairs: names of all calls -> more rows, or, if systems have several calls, all rows.
        absent: systems that cannot run here, with the reason.
        again: whether the reference runs twice.
        bounds: `Pair.bound` by name of a system.
        scale_bounds_by: a system whose ratio to the reference shows how much concurrent processes slow each other;
            bounds are multiplied by that ratio.
    """

    title: str
    systems: Sequence[System]
    divide_by: int = 1
    pairs: Callable[[Collection[str]], Sequence[Pair]] = lambda _: ()
    absent: Mapping[str, str] = field(default_factory=dict)
    again: bool = True
    bounds: Mapping[str, float] = field(default_factory=dict)
    scale_bounds_by: str | None = None


@dataclass(frozen=True)
class Measured:
    """The results of the launches of a group.

    Attributes:
        launches: per launch, the seconds of each call by name.
        losses: per launch, the losses of each system that has them, by step, including the warm-up.
        memory: peak over all launches, by name of the system.
        foreign: per round, the share of the machine's processors that other processes took.
    """

    launches: list[Rounds]
    losses: list[dict[str, list[float]]]
    memory: dict[str, Memory]
    foreign: list[float]


def measure(systems: Sequence[System], launches: int, rounds: int) -> Measured:
    """Time every call of the systems in `launches` launches of `rounds` rounds each."""
    found = Measured([], [], {}, [])
    for launch in range(launches):
        order = torch.Generator().manual_seed(launch)
        with running(systems) as live:
            calls = [(one, call) for one in live for call in one.calls]
            times: dict[str, list[float]] = {call: [] for _, call in calls}
            losses: dict[str, list[float]] = {one.system.name: [] for one in live if one.system.has_loss}
            for number in range(WARM_UP + rounds):
                before, own = cpu_times(), 0.0
                for place in torch.randperm(len(calls), generator=order).tolist():
                    one, call = calls[place]
                    done = one.do(call)
                    own += done.processor
                    if number >= WARM_UP:
                        times[call].append(done.seconds)
                    if one.system.has_loss:
                        losses[one.system.name].append(done.result)
                if number >= WARM_UP:
                    found.foreign.append(foreign_share(before, cpu_times(), own))
            _keep_most(found.memory, live)
        found.launches.append(times)
        found.losses.append(losses)
    return found


def _keep_most(memory: dict[str, Memory], live: Sequence[Running]) -> None:
    for one in live:
        now, name = one.memory(), one.system.name
        before = memory.get(name, now)
        memory[name] = Memory(max(before.built_mb, now.built_mb), max(before.steady_mb, now.steady_mb))


def rows_of(group: Group, measured: Measured) -> list[dict[str, Any]]:
    """Return the rows of a group's table, in the form of the JSON files."""
    reference, systems = group.systems[0].name, {system.name: system for system in _with_again(group)}
    calls = list(measured.launches[0])
    slower = ratio(measured.launches, group.scale_bounds_by, reference).value if group.scale_bounds_by else 1.0
    bounds = {name: bound * slower for name, bound in group.bounds.items()}
    pairs = [Pair(n, n, reference, group.divide_by, bounds.get(n)) for n in systems if n in calls]
    rows = [_row(pair, systems.get(pair.call), measured) for pair in (*pairs, *group.pairs(calls))]
    absent = {"ratio": None, "ci95": None, "seconds": None, "peak_mb": None}
    return rows + [{"system": name, "reason": reason} | absent for name, reason in group.absent.items()]


def _row(pair: Pair, system: System | None, measured: Measured) -> dict[str, Any]:
    found: Ratio = ratio(measured.launches, pair.call, pair.reference, pair.divide_by)
    row: dict[str, Any] = {
        "system": pair.row,
        "ratio": found.value,
        "ci95": [found.low, found.high if math.isfinite(found.high) else None],
        "seconds": seconds(measured.launches, pair.call),
        "spread": spread(measured.launches, pair.call),
        "peak_mb": None,
    }
    if system is not None:
        memory = measured.memory[system.name]
        row |= {"peak_mb": memory.steady_mb, "built_mb": memory.built_mb, "transport": system.transport}
    return row if pair.bound is None else row | {"bound": pair.bound}


def _with_again(group: Group) -> list[System]:
    first, *others = group.systems
    return [first, replace(first, name=first.name + AGAIN), *others] if group.again else [first, *others]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all benchmark scripts share."""
    parser.add_argument("--launches", type=int, default=LAUNCHES, help="launches of processes (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=LAUNCHES * ROUNDS, help="rounds, over all launches (default: 21)")
    parser.add_argument("--only", nargs="+", default=["*"], help="shell patterns of systems to compare")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--save", action="store_true", help="save the measurements in docs/figures, for the tables")


def chosen(systems: Sequence[System], only: Sequence[str]) -> list[System]:
    """Return the first system, and all others whose name matches one of the shell patterns."""
    reference, *others = systems
    return [reference, *(one for one in others if any(fnmatchcase(one.name, pattern) for pattern in only))]


def run(groups: Iterable[Group], options: argparse.Namespace, more: Sequence[Callable[[], figures.Report]] = ()) -> int:
    """Measure the groups one after the other; print tables or one JSON object; keep the reports if asked to.

    Args:
        more: make further reports, afterwards.
    """
    rounds, reports, losses = -(-options.pairs // options.launches), [], list[dict[str, list[float]]]()
    for group in groups:
        measured = measure(_with_again(group), options.launches, rounds)
        losses.extend(measured.losses)
        reports.append(_report(group, measured, options, loss_difference(losses)))
        _show(reports[-1], options)
    for report in (make() for make in more):
        reports.append(report)
        _show(report, options)
    if options.json:
        print(json.dumps(figures.merged(reports), indent=1))
    return 0


def _show(report: figures.Report, options: argparse.Namespace) -> None:
    if options.save:
        figures.keep(Path(sys.argv[0]).stem, report)
    if not options.json:
        print(figures.whole(report), end="\n\n", flush=True)


def loss_difference(launches: Sequence[Mapping[str, Sequence[float]]]) -> float | None:
    """Return the largest relative difference between any system's losses and the first's, on their common steps.

    Args:
        launches: the launches of all groups so far; each has the losses of its systems by step.
    """
    histories = [history for launch in launches for history in launch.values()]
    if len(histories) < 2:
        return None
    first = histories[0]
    return max(abs(b - a) / abs(a) for other in histories[1:] for a, b in zip(first, other, strict=False))


def _report(group: Group, measured: Measured, options: argparse.Namespace, difference: float | None) -> dict[str, Any]:
    name = group.systems[0].name
    floor_s = seconds(measured.launches, name) / group.divide_by if name in measured.launches[0] else None
    return figures.about(sys.argv) | {
        "title": group.title,
        "launches": options.launches,
        "rounds": len(measured.foreign) // options.launches,
        "floor_s": floor_s,
        "loss_difference": difference,
        "foreign": {"median": statistics.median(measured.foreign), "most": max(measured.foreign)},
        "rows": rows_of(group, measured),
    }


def cpu_times() -> tuple[float, float]:
    """Return (busy, total) CPU seconds of the whole machine since it started."""
    with open("/proc/stat") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    per_second = os.sysconf("SC_CLK_TCK")
    return (sum(ticks) - ticks[3] - ticks[4]) / per_second, sum(ticks) / per_second


def foreign_share(before: tuple[float, float], after: tuple[float, float], own: float) -> float:
    """Return the share of the machine's CPU time between two readings that other processes took."""
    return max(0.0, after[0] - before[0] - own) / max(after[1] - before[1], 1e-9)
