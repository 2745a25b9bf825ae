"""Side-by-side timing of training systems in one run.

Machines are noisy, so absolute times mean nothing and two runs cannot be compared. Every system is one process that
stays alive with its model built; the parent lets one of them at a time do one step, round after round: the reference
first, then each system. A round gives one *paired* ratio per system, step time / reference step time of the same round.
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
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import comb
from multiprocessing.connection import Connection
from typing import Any

FOREIGN_LIMIT = 0.10  # of all CPUs, by processes that are not ours, in a round that counts
WARM_UP = 2  # steps before the first round
MAX_ROUNDS = 3  # rounds tried at most, times the rounds asked for


@dataclass(frozen=True)
class System:
    """A thing to time.

    Args:
        name: as in the table.
        build: called in the system's own process with `arguments`; returns a function that does one step and returns
            the step's loss.
        arguments: for `build`.
        threads: of torch, in that process.
    """

    name: str
    build: Callable[..., Callable[[], float]]
    arguments: tuple[Any, ...]
    threads: int


@dataclass(frozen=True)
class Measured:
    """One row: ratio to the reference with its 95 % interval, peak resident MB of the process, median seconds."""

    system: str
    ratio: float
    ci95: tuple[float, float]
    peak_mb: float
    seconds: float


@dataclass(frozen=True)
class Comparison:
    """The rows, and each system's losses in order of its steps (warm-up included)."""

    rows: list[Measured]
    losses: dict[str, list[float]]
    quiet_rounds: int
    rounds: int


def compare(reference: System, systems: Sequence[System], rounds: int) -> Comparison:
    """Times `systems` against `reference` in at least `rounds` interleaved rounds."""
    context = multiprocessing.get_context("spawn")
    ends, processes = [], []
    for system in (reference, *systems):
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(system, theirs), daemon=True)
        process.start()
        theirs.close()
        ends.append(ours)
        processes.append(process)
    losses: list[list[float]] = [[] for _ in ends]
    for _ in range(WARM_UP):
        _round(ends, losses)
    kept: list[list[float]] = []
    noisy: list[list[float]] = []
    while len(kept) < rounds and len(kept) + len(noisy) < MAX_ROUNDS * rounds:
        before = _cpu_times()
        seconds, own = _round(ends, losses)
        (kept if _foreign_share(before, _cpu_times(), own) <= FOREIGN_LIMIT else noisy).append(seconds)
    quiet = len(kept)
    used = kept if quiet >= rounds else kept + noisy
    peaks = [_ask(end, "peak")[0] for end in ends]
    for end, process in zip(ends, processes, strict=True):
        end.send("stop")
        process.join()
    columns = list(zip(*used, strict=True))
    rows = [
        _row(system.name, column, columns[0], peak)
        for system, column, peak in zip((reference, *systems), columns, peaks, strict=True)
    ]
    names = [system.name for system in (reference, *systems)]
    return Comparison(rows, dict(zip(names, losses, strict=True)), quiet, len(used))


def report(comparison: Comparison, floor_s: float) -> dict[str, Any]:
    """The contract's JSON object."""
    return {
        "machine": machine(),
        "versions": versions(),
        "floor_s": floor_s,
        "rows": [asdict(row) for row in comparison.rows],
        "quiet_rounds": comparison.quiet_rounds,
        "rounds": comparison.rounds,
    }


def table(title: str, comparison: Comparison) -> str:
    """The human form, in Markdown."""
    lines = [f"{title} ({comparison.quiet_rounds} of {comparison.rounds} rounds quiet)", ""]
    lines += ["| system | ratio | 95 % interval | step s | peak MB |", "|---|---|---|---|---|"]
    for row in comparison.rows:
        interval = f"{row.ci95[0]:.3f} to {row.ci95[1]:.3f}"
        lines.append(f"| {row.system} | {row.ratio:.3f} | {interval} | {row.seconds:.3f} | {row.peak_mb:,.0f} |")
    return "\n".join(lines)


def machine() -> str:
    """Processor, usable cores and memory of this machine."""
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
    """The order statistics that enclose the median with at least `confidence` (or the range, for few values)."""
    ordered, n = sorted(values), len(values)
    tail, k = 0.0, 0
    while k < n // 2:
        tail += comb(n, k) / 2**n
        if 2 * tail > 1 - confidence:
            break
        k += 1
    k = max(k - 1, 0)
    return ordered[k], ordered[n - 1 - k]


def dump(report_object: dict[str, Any]) -> str:
    return json.dumps(report_object, indent=1)


def _serve(system: System, end: Connection) -> None:
    """A system's process: does what the parent says until it says stop (or is gone)."""
    import torch

    torch.set_num_threads(system.threads)
    step = system.build(*system.arguments)
    while (order := end.recv()) != "stop":
        if order == "peak":
            end.send((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 0.0, 0.0))
            continue
        cpu, began = time.process_time(), time.perf_counter()
        loss = step()
        end.send((time.perf_counter() - began, time.process_time() - cpu, loss))


def _ask(end: Connection, order: str) -> tuple[float, float, float]:
    end.send(order)
    return end.recv()


def _round(ends: Sequence[Connection], losses: list[list[float]]) -> tuple[list[float], float]:
    """One step of each system; (their seconds, the CPU seconds they took)."""
    answers = [_ask(end, "step") for end in ends]
    for history, (_, _, loss) in zip(losses, answers, strict=True):
        history.append(loss)
    return [seconds for seconds, _, _ in answers], sum(cpu for _, cpu, _ in answers)


def _row(name: str, column: Sequence[float], reference: Sequence[float], peak: float) -> Measured:
    ratios = [mine / theirs for mine, theirs in zip(column, reference, strict=True)]
    return Measured(name, statistics.median(ratios), median_interval(ratios), peak, statistics.median(column))


def _cpu_times() -> tuple[float, float]:
    """(busy, all) CPU seconds of the whole machine since it started."""
    with open("/proc/stat") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    per_second = os.sysconf("SC_CLK_TCK")
    return (sum(ticks) - ticks[3] - ticks[4]) / per_second, sum(ticks) / per_second


def _foreign_share(before: tuple[float, float], after: tuple[float, float], own: float) -> float:
    """Share of the machine's CPU time between two readings that was neither idle nor ours."""
    return max(0.0, after[0] - before[0] - own) / max(after[1] - before[1], 1e-9)
