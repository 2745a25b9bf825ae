"""Time training systems side by side in one run.

Machines are noisy, so absolute times mean nothing and two runs cannot be compared. Every system is one process, or
several ranks that work together, which stay alive with their model built; the parent lets one system at a time do one
step, round after round, in an order drawn anew for each. A round gives one *paired* ratio per system, step time /
reference step time of the same round. A step of several ranks takes as long as its slowest rank.
Rounds during which other processes of the machine took more than 10 % of the CPU are thrown away and repeated (up to a
limit, then all that is left is kept and said so). Reported are the median of the paired ratios and its 95 % interval by
order statistics (Conover 1999, section 3.2), which assumes nothing about their distribution.
"""

import json
import multiprocessing
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from math import comb
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

import torch

FOREIGN_LIMIT = 0.10  # of all CPUs, by processes that are not ours, in a round that counts
WARM_UP = 2  # steps before the first round
MAX_ROUNDS = 3  # rounds tried at most, times the rounds asked for

Answer = tuple[float, float, float]  # of a rank to "step": seconds, CPU seconds, loss; to "peak": MB, 0, 0


@dataclass(frozen=True)
class System:
    """One system to time.

    Args:
        name: as in the table.
        build: called in the system's own process with `arguments`; returns a function that does one step and returns
            the step's loss. With several ranks it is called in each one's process with `arguments`, the rank, the
            number of ranks, and a path for the file at which they meet (torch's FileStore).
        arguments: for `build`.
        threads: of torch, in each process.
        ranks: processes that the system consists of. Its loss is the mean of theirs.
        exchanges: whether its ranks train one model together, so that its losses can be compared with others'.
        needs_script: whether its processes import the script that runs, as spawned ones do. `build` of a system that
            does not lies in a module.
    """

    name: str
    build: Callable[..., Callable[[], float]]
    arguments: tuple[Any, ...]
    threads: int
    ranks: int = 1
    exchanges: bool = True
    needs_script: bool = True


@dataclass(frozen=True)
class Measured:
    """One row: ratio to the reference with its 95 % interval, peak resident MB of the largest rank, median seconds.

    A system that cannot run here has only the name and the reason. `bound` is the least ratio that theory allows it.
    """

    system: str
    ratio: float | None
    ci95: tuple[float, float] | None
    peak_mb: float | None
    seconds: float | None
    reason: str | None = None
    bound: float | None = None

    @classmethod
    def absent(cls, system: str, reason: str) -> "Measured":
        return cls(system, None, None, None, None, reason)


@dataclass(frozen=True)
class Comparison:
    """The rows, and the losses of each system that exchanges, in order of its steps (warm-up included).

    `seconds` has each system's step times, one for each round that counts.
    """

    rows: list[Measured]
    losses: dict[str, list[float]]
    quiet_rounds: int
    rounds: int
    seconds: dict[str, list[float]] = field(default_factory=dict)

    @property
    def reference_s(self) -> float:
        """Return the median seconds of the reference's step."""
        seconds = self.rows[0].seconds
        assert seconds is not None, "the reference has run"
        return seconds


@dataclass(frozen=True, eq=False)
class _Running:
    """A system whose processes have built it: this side of their pipes, in rank order."""

    ends: list[Connection]
    processes: list[BaseProcess]

    @classmethod
    def start(cls, context: SpawnContext, system: System, store: str) -> "_Running":
        """Start all ranks of `system`, and wait until each has built it, so that no two systems build at once."""
        running = cls([], [])
        for rank in range(system.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(system, rank, store, theirs), daemon=True)
            _start(process, system.needs_script)
            theirs.close()
            running.ends.append(ours)
            running.processes.append(process)
        running.answers()
        return running

    def ask(self, order: str) -> list[Answer]:
        """Return each rank's answer. All get the order before the first answer is read: they may need each other."""
        for end in self.ends:
            end.send(order)
        return self.answers()

    def answers(self) -> list[Answer]:
        """Return the answers, read as they come: when a rank dies, others may never answer.

        The dead rank's pipe raises EOFError.
        """
        found: dict[Connection, Answer] = {}
        while len(found) < len(self.ends):
            waiting = [end for end in self.ends if end not in found]
            ready = wait(waiting)
            found |= {end: end.recv() for end in waiting if end in ready}
        return [found[end] for end in self.ends]

    def stop(self) -> None:
        for end in self.ends:
            end.send("stop")
        for process in self.processes:
            process.join()


def measure(call: Callable[..., Any], ranks: int) -> list[Any]:
    """Return what `call(rank, ranks, store)` returns on each of several concurrent ranks of one thread each."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
        processes = [
            context.Process(target=_measure, args=(call, rank, ranks, f"{folder}/store", theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(processes, pipes, strict=True):
            process.start()
            theirs.close()
        results = [ours.recv() for ours, _ in pipes]
        for process in processes:
            process.join()
        return results


def _measure(call: Callable[..., Any], rank: int, ranks: int, store: str, end: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    end.send(call(rank, ranks, store))


def compare(reference: System, systems: Sequence[System], rounds: int, divide_by: int = 1) -> Comparison:
    """Time `systems` against `reference` in at least `rounds` interleaved rounds.

    Args:
        divide_by: the ratio's denominator is reference seconds / divide_by. With a reference of one process and
            systems of n ranks, divide_by=n makes 1.00 the perfect division of its work. The reference's own row then
            has ratio n, and n / (a system's ratio) is that system's speed-up over it.
    """
    context = multiprocessing.get_context("spawn")
    everyone = (reference, *systems)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        running = [_Running.start(context, one, f"{folder}/store-{i}") for i, one in enumerate(everyone)]
        losses: list[list[float]] = [[] for _ in running]
        order = torch.Generator().manual_seed(0)
        for _ in range(WARM_UP):
            _round(running, losses, order)
        kept: list[list[float]] = []
        noisy: list[list[float]] = []
        while len(kept) < rounds and len(kept) + len(noisy) < MAX_ROUNDS * rounds:
            before = _cpu_times()
            seconds, own = _round(running, losses, order)
            (kept if _foreign_share(before, _cpu_times(), own) <= FOREIGN_LIMIT else noisy).append(seconds)
        peaks = [max(peak for peak, _, _ in one.ask("peak")) for one in running]
        for one in running:
            one.stop()
    quiet = len(kept)
    columns = list(zip(*(kept if quiet >= rounds else kept + noisy), strict=True))
    denominators = [seconds / divide_by for seconds in columns[0]]
    names = [system.name for system in everyone]
    rows = [_row(name, column, denominators, peak) for name, column, peak in zip(names, columns, peaks, strict=True)]
    comparable = {one.name: history for one, history in zip(everyone, losses, strict=True) if one.exchanges}
    seconds = {name: list(column) for name, column in zip(names, columns, strict=True)}
    return Comparison(rows, comparable, quiet, len(columns[0]), seconds)


def present(measured: Iterable[tuple[str, float, Comparison]], as_json: bool) -> None:
    """Print (title, floor_s, comparison) one by one as tables, or all of them at the end as one JSON object."""
    reports = []
    for title, floor_s, comparison in measured:
        difference = loss_difference(comparison)
        reports.append(report(comparison, floor_s) | {"loss_difference": difference})
        if not as_json:
            print(table(f"{title}, losses within {difference:.1e}", comparison), end="\n\n", flush=True)
    if as_json:
        print(dump(reports))


def loss_difference(comparison: Comparison) -> float:
    """Return the largest relative difference between the first system's losses and any other's, over all steps."""
    if len(comparison.losses) < 2:
        return 0.0
    reference, *others = comparison.losses.values()
    return max(abs(b - a) / abs(a) for other in others for a, b in zip(reference, other, strict=True))


def report(comparison: Comparison, floor_s: float) -> dict[str, Any]:
    """Return the contract's JSON object."""
    return {
        "machine": machine(),
        "versions": versions(),
        "floor_s": floor_s,
        "rows": [asdict(row) for row in comparison.rows],
        "quiet_rounds": comparison.quiet_rounds,
        "rounds": comparison.rounds,
    }


def table(title: str, comparison: Comparison) -> str:
    """Return the table for people, in Markdown."""
    lines = [f"{title} ({comparison.quiet_rounds} of {comparison.rounds} rounds quiet)", ""]
    bounded = any(row.bound is not None for row in comparison.rows)
    lines += ["| system | ratio | 95 % interval | step s | peak MB |" + " bound |" * bounded]
    lines += ["|---|---|---|---|---|" + "---|" * bounded]
    for row in comparison.rows:
        if row.ratio is None or row.ci95 is None:
            lines.append(f"| {row.system} | {row.reason} | | | |" + " |" * bounded)
            continue
        interval = f"{row.ci95[0]:.3f} to {row.ci95[1]:.3f}"
        line = f"| {row.system} | {row.ratio:.3f} | {interval} | {row.seconds:.3f} | {row.peak_mb:,.0f} |"
        line += f" {row.bound:.3f} |" if row.bound is not None else " |" * bounded
        lines.append(line)
    return "\n".join(lines)


def machine() -> str:
    """Return processor, usable cores and memory of this machine."""
    model = platform.processor() or platform.machine()
    with open("/proc/cpuinfo") as file:
        model = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), model)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB"


def versions() -> dict[str, str]:
    import torch

    import megazero

    return {"python": platform.python_version(), "torch": torch.__version__, "megazero": megazero.__version__}


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return the order statistics that enclose the median with at least `confidence` (few values: the range)."""
    ordered, n = sorted(values), len(values)
    tail, k = 0.0, 0
    while k < n // 2:
        tail += comb(n, k) / 2**n
        if 2 * tail > 1 - confidence:
            break
        k += 1
    k = max(k - 1, 0)
    return ordered[k], ordered[n - 1 - k]


def dump(reports: Sequence[dict[str, Any]]) -> str:
    """Return several reports of one run as one: all rows, the largest difference of losses, the rest of the first."""
    merged = dict(reports[0]) | {"rows": [row for one in reports for row in one["rows"]]}
    merged["loss_difference"] = max(one["loss_difference"] for one in reports)
    return json.dumps(merged, indent=1)


def _start(process: BaseProcess, needs_script: bool) -> None:
    """Start a process; hide the script that runs from one that does not need it, so that it imports no more of ours."""
    script = sys.modules["__main__"]
    try:
        if not needs_script:
            sys.modules["__main__"] = ModuleType("__main__")  # without a file
        process.start()
    finally:
        sys.modules["__main__"] = script


def _serve(system: System, rank: int, store: str, end: Connection) -> None:
    """Run one rank of a system in its process: do what the parent says until it says stop (or is gone)."""
    import torch

    torch.set_num_threads(system.threads)
    place = () if system.ranks == 1 else (rank, system.ranks, store)
    step = system.build(*system.arguments, *place)
    end.send((0.0, 0.0, 0.0))  # built
    while (order := end.recv()) != "stop":
        if order == "peak":
            end.send((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 0.0, 0.0))
            continue
        cpu, began = time.process_time(), time.perf_counter()
        loss = step()
        end.send((time.perf_counter() - began, time.process_time() - cpu, loss))


def _round(running: Sequence[_Running], losses: list[list[float]], order: torch.Generator) -> tuple[list[float], float]:
    """Run one step of each system; return (their seconds, the CPU seconds that all their ranks took)."""
    seconds, own = [0.0] * len(running), 0.0
    for number in torch.randperm(len(running), generator=order).tolist():
        answers = running[number].ask("step")
        seconds[number] = max(elapsed for elapsed, _, _ in answers)
        own += sum(cpu for _, cpu, _ in answers)
        losses[number].append(statistics.fmean(loss for _, _, loss in answers))
    return seconds, own


def _row(name: str, column: Sequence[float], denominators: Sequence[float], peak: float) -> Measured:
    ratios = [mine / theirs for mine, theirs in zip(column, denominators, strict=True)]
    return Measured(name, statistics.median(ratios), median_interval(ratios), peak, statistics.median(column))


def _cpu_times() -> tuple[float, float]:
    """Return (busy, all) CPU seconds of the whole machine since it started."""
    with open("/proc/stat") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    per_second = os.sysconf("SC_CLK_TCK")
    return (sum(ticks) - ticks[3] - ticks[4]) / per_second, sum(ticks) / per_second


def _foreign_share(before: tuple[float, float], after: tuple[float, float], own: float) -> float:
    """Return the share of the machine's CPU time between two readings that was neither idle nor ours."""
    return max(0.0, after[0] - before[0] - own) / max(after[1] - before[1], 1e-9)
