"""Run the systems to be timed: each is one process or several ranks, which stay alive after building their model.

The parent orders a call from a system; every rank answers with its seconds, its processor seconds and the call's
result. A call of several ranks takes as long as its slowest rank.
"""

import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

Call = Callable[[], float]
_MEMORY, _STOP = "memory", "stop"  # orders other than names of calls


@dataclass(frozen=True)
class System:
    """One system to time.

    Args:
        name: name in the table; a single call has this name too.
        build: called in the system's process with `arguments`; returns a function that does one step and returns the
            step's loss, or several such calls by name. With several ranks, each rank's process calls it with
            `arguments`, the rank, the number of ranks, and the path of the file for their rendezvous (FileStore).
        arguments: arguments of `build`.
        threads: threads of torch in each process.
        ranks: number of processes. The system's loss is the mean of theirs.
        transport: how its ranks communicate: "shared memory", "sockets"; "": they do not.
        has_loss: calls return a loss, which is compared with those of other systems.
        times_itself: calls return their seconds, without those of preparation and cleanup.
        needs_script: whether its processes import the running script, as spawned processes do. Otherwise `build` must
            be in a module.
    """

    name: str
    build: Callable[..., Call | Mapping[str, Call]]
    arguments: tuple[Any, ...] = ()
    threads: int = 1
    ranks: int = 1
    transport: str = ""
    has_loss: bool = True
    times_itself: bool = False
    needs_script: bool = True


@dataclass(frozen=True)
class Done:
    """The result of a call on all ranks: seconds of the slowest, sum of processor seconds, mean of results."""

    seconds: float
    processor: float
    result: float


@dataclass(frozen=True)
class Memory:
    """Peak resident megabytes of the largest rank of a system: while it was built, and afterwards."""

    built_mb: float
    steady_mb: float


@dataclass(frozen=True, eq=False)
class Running:
    """A system whose processes are ready; `ends`: the parent's ends of their pipes, in rank order."""

    system: System
    ends: list[Connection]
    processes: list[BaseProcess]
    calls: list[str]

    def do(self, call: str) -> Done:
        """Do a call. Send the order to all ranks before reading an answer, as they may wait for each other."""
        answers = self._ask(call)
        seconds = max(seconds for seconds, _, _ in answers)
        result = statistics.fmean(result for _, _, result in answers)
        if self.system.times_itself:
            seconds = max(result for _, _, result in answers)
        return Done(seconds, sum(processor for _, processor, _ in answers), result)

    def memory(self) -> Memory:
        """Return the peak memory of the largest rank."""
        answers = self._ask(_MEMORY)
        return Memory(max(built for built, _ in answers), max(steady for _, steady in answers))

    def stop(self) -> None:
        """Stop all processes and wait until they have ended."""
        for end in self.ends:
            end.send(_STOP)
        for process in self.processes:
            process.join()

    def _ask(self, order: str) -> list[Any]:
        """Send an order to all ranks; return their answers.

        Raises:
            SystemExit: a process has ended, perhaps because the kernel killed it for lack of memory.
        """
        try:
            for end in self.ends:
                end.send(order)
            return _answers(self.ends)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            codes = [process.exitcode for process in self.processes]
            sys.exit(f"{self.system.name}: a process has ended (exit codes {codes}; -9: perhaps for lack of memory)")


@contextmanager
def running(systems: Sequence[System]) -> Iterator[list[Running]]:
    """Start systems one after the other, so that no two build at the same time; stop all at the end.

    Raises:
        EOFError: a process ended while it built; its output says why.
    """
    context = multiprocessing.get_context("spawn")
    started: list[Running] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for number, system in enumerate(systems):
            one = Running(system, [], [], [])
            for rank in range(system.ranks):
                ours, theirs = context.Pipe()
                target = (system, rank, f"{folder}/store-{number}", theirs)
                process = context.Process(target=_serve, args=target, daemon=True)
                _start(process, system.needs_script)
                theirs.close()
                one.ends.append(ours)
                one.processes.append(process)
            one.calls.extend(_answers(one.ends)[0])
            started.append(one)
        yield started
        for one in started:
            one.stop()


def on_ranks(call: Callable[..., Any], ranks: int) -> list[Any]:
    """Run `call(rank, ranks, store)` on concurrent ranks of one thread each; return the results in rank order."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
        processes = [
            context.Process(target=_once, args=(call, rank, ranks, f"{folder}/store", theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(processes, pipes, strict=True):
            process.start()
            theirs.close()
        results = [ours.recv() for ours, _ in pipes]
        for process in processes:
            process.join()
        return results


def _once(call: Callable[..., Any], rank: int, ranks: int, store: str, end: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    end.send(call(rank, ranks, store))


def _answers(ends: Sequence[Connection]) -> list[Any]:
    """Return one answer of each rank. Read whichever pipe is ready: after a rank dies, others may never answer.

    Raises:
        EOFError: a rank has died.
    """
    found: dict[Connection, Any] = {}
    while len(found) < len(ends):
        waiting = [end for end in ends if end not in found]
        ready = wait(waiting)
        found |= {end: end.recv() for end in waiting if end in ready}
    return [found[end] for end in ends]


def _start(process: BaseProcess, needs_script: bool) -> None:
    """Start a process; unless it needs the running script, hide the script so that the process does not import it."""
    script = sys.modules["__main__"]
    try:
        if not needs_script:
            sys.modules["__main__"] = ModuleType("__main__")  # without a file
        process.start()
    finally:
        sys.modules["__main__"] = script


def _serve(system: System, rank: int, store: str, end: Connection) -> None:
    """Run one rank of a system in its process: obey the parent's orders until the order to stop."""
    import torch

    torch.set_num_threads(system.threads)
    place = () if system.ranks == 1 else (rank, system.ranks, store)
    built = system.build(*system.arguments, *place)
    calls = built if isinstance(built, Mapping) else {system.name: built}
    most = _peak_mb()
    with suppress(OSError):  # reset the peak, which is that of building
        Path("/proc/self/clear_refs").write_text("5")
    end.send(list(calls))
    while (order := end.recv()) != _STOP:
        if order == _MEMORY:
            end.send((most, _peak_mb()))
            continue
        processor, began = _processor_seconds(), time.perf_counter()
        result = calls[order]()
        end.send((time.perf_counter() - began, _processor_seconds() - processor, result))


def _processor_seconds() -> float:
    """Return the processor seconds of this process and of its children that have ended."""
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _peak_mb() -> float:
    """Return the peak resident megabytes (1e6) since the start, or since the last reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
