"""Rehearse the start of many ranks on this host with a real store: seconds and requests of each stage.

    python scripts/bench/start.py [--ranks 8 64 512 2048] [--launches 3] [--json] [--save]

A rank is a thread with its own connections. The ranks are spread over `PROCESSES` processes; one more process has rank
0 and the store, as in a job. Eight ranks form a simulated host. The rehearsal covers what goes through the store:
connecting; the roll call; one key for each communicator of a grid, as NCCL exchanges them (tensor 8, pipeline 4, if
there are enough ranks); and a failure, upon which every rank publishes its slot and one rank reads them all. The roll
is unpacked once per process (20 ms for 2,048 ranks, which real ranks spend in parallel). It makes neither torch's
process groups nor NCCL's connections, and nothing goes over a network.

Seconds are those until the last rank has finished a stage, as the median of the launches. *Requests* are those of a
rank to the store over all stages, as the median of all ranks but rank 0; rank 0, which answers for all, has its own
column.
"""

import argparse
import itertools
import json
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from any folder, also without an installation

from torch._C._distributed_c10d import Store, TCPStore

from megazero.comm.context import CommContext
from megazero.comm.grid import lay_out
from megazero.comm.status_board import STUCK, StatusBoard, StatusSlot
from megazero.launcher import meeting
from megazero.launcher.job_board import JobBoard
from megazero.launcher.meeting import Presence, Verdict, call_roll, unpacked
from megazero.launcher.stacks import Stacks
from scripts.bench import figures
from scripts.bench.harness import LAUNCHES

RANKS = (8, 64, 512, 2048)
PROCESSES, PER_HOST = 8, 8
STAGES = ("connect", "roll call", "axes", "failure")
TIMEOUT = timedelta(seconds=300)


class CountingStore:
    """A client of torch's store that counts its requests and their keys.

    Args:
        port: the port of the store on this host.
        store: the client; None: a new one.
    """

    timeout = TIMEOUT

    def __init__(self, port: int, store: TCPStore | None = None):
        self._port, self._store = port, store or _client(port)
        self.requests = self.keys = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        asked = getattr(self._store, name)

        def counted(*arguments: Any) -> Any:
            self.requests += 1
            self.keys += len(arguments[0]) if name in ("check", "wait", "multi_get") else 1
            return asked(*arguments)

        return counted

    def clone(self) -> "CountingStore":
        """Return a client with its own connection, as torch's `clone` does; its requests do not count here."""
        return CountingStore(self._port)


def _client(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, timeout=TIMEOUT, wait_for_workers=False)


@dataclass
class Rehearsed:
    """The figures of one rank.

    Attributes:
        ends: the time at the start and at the end of each stage.
        requests, keys: numbers in each stage.
    """

    rank: int
    ends: list[float] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)

    def note(self, store: CountingStore | None) -> None:
        """Record the end of a stage."""
        self.ends.append(time.monotonic())
        if store is not None:
            self.requests.append(store.requests - sum(self.requests))
            self.keys.append(store.keys - sum(self.keys))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--launches", type=int, default=LAUNCHES, help="launches of each (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--save", action="store_true", help="save the measurements in docs/figures, for the tables")
    options = parser.parse_args()
    rows = []
    for size in options.ranks:
        launches = [rehearse(size, PROCESSES) for _ in range(options.launches)]
        rows.append({"system": f"{size:,} ranks", "columns": columns_of(launches)})
    report = figures.report_of("starting many ranks", rows, launches=options.launches)
    return figures.tell([report], as_json=options.json, save=options.save)


def rehearse(size: int, processes: int) -> list[Rehearsed]:
    """Run `size` ranks and return their figures; with 0 processes, run them as threads of this process."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    port = listener.getsockname()[1]
    shares = [range(size)]
    if processes:
        step = -(-(size - 1) // processes)
        shares = [range(1), *(range(first, min(first + step, size)) for first in range(1, size, step))]
    begin = time.monotonic() + (1.0 if processes else 0.0)
    others = [_forked(lambda ranks=ranks: _run(ranks, size, port, begin)) for ranks in shares[1:]]
    serve = {"is_master": True, "master_listen_fd": listener.detach()}
    server = TCPStore("127.0.0.1", port, timeout=TIMEOUT, wait_for_workers=False, **serve)
    found = _run(shares[0], size, port, begin)
    for answer in others:
        found += answer()
    del server
    assert len(found) == size, f"{len(found)} of {size} ranks came through"
    return sorted(found, key=lambda one: one.rank)


def columns_of(launches: Sequence[Sequence[Rehearsed]]) -> dict[str, float]:
    """Return the figures of one number of ranks by column head."""
    seconds = [_seconds(found) for found in launches]
    return {
        **{f"{name} s": statistics.median(one[at] for one in seconds) for at, name in enumerate(STAGES)},
        "requests": statistics.median(sum(one.requests) for found in launches for one in found[1:]),
        "of rank 0": statistics.median(sum(found[0].requests) for found in launches),
    }


def _seconds(found: Sequence[Rehearsed]) -> list[float]:
    """Return the seconds of each stage, until the last rank has finished it."""
    ends = [max(one.ends[at] for one in found) for at in range(len(STAGES) + 1)]
    return [after - before for before, after in itertools.pairwise(ends)]


class _Once:
    """`meeting.unpacked`, computed once for all ranks of this process."""

    def __init__(self) -> None:
        self._lock, self._found = threading.Lock(), dict[bytes, Verdict]()

    def __call__(self, packed: bytes) -> Verdict:
        with self._lock:
            if packed not in self._found:
                self._found[packed] = unpacked(packed)
            return self._found[packed]


def _run(ranks: range, size: int, port: int, begin: float) -> list[Rehearsed]:
    """Run ranks in threads of this process."""
    found: list[Rehearsed] = []
    threading.stack_size(1 << 20)
    threads = [threading.Thread(target=_be, args=(rank, size, port, begin, found)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def _be(rank: int, size: int, port: int, begin: float, found: list[Rehearsed]) -> None:
    """Run one rank from its first connection to its end."""
    done = Rehearsed(rank)
    time.sleep(max(0.0, begin - time.monotonic()))
    done.note(None)
    counting = CountingStore(port)
    store: Any = counting  # it has the methods that a rank calls
    done.note(counting)
    host = rank // PER_HOST
    mine = Presence(f"host{host}", "same", os.getpid(), host)
    roll = call_roll(store, rank, size, TIMEOUT.total_seconds(), mine)
    done.note(counting)
    board = JobBoard(store, rank, roll)
    slot = StatusBoard().status_slot(0)
    slot.take(mine.host)
    slot.move(board, rank)
    _exchange(store, rank, size)
    done.note(counting)
    waiting = board.listen(Stacks())
    if rank == size - 1:
        _fail(size, slot, board)
    waiting.join()
    done.note(counting)
    found.append(done)
    if store.add("gone", 1) == size:
        store.set("all gone", "")
    if rank == 0:
        store.wait(["all gone"])


def _exchange(store: Store, rank: int, size: int) -> None:
    """Exchange one key for each communicator of this rank; the first rank of a communicator sets it."""
    tensor = min(8, size)
    pipeline = 4 if size % (4 * tensor) == 0 else 1
    grid = lay_out(rank, size, comm=CommContext(), tensor=tensor, pipeline=pipeline)
    for axis in dict.fromkeys(grid[name] for name in ("world", "pipeline", "data", "tensor")):
        if axis.size > 1:
            name = f"group/{axis.name}/{axis.first}"
            store.set(name, "x" * 128) if axis.rank == 0 else store.get(name)


def _fail(size: int, slot: StatusSlot, board: JobBoard) -> None:
    """Let this rank fail, and read the slots of all ranks."""
    slot.set_state(STUCK, "world")
    board.raise_alarm()
    statuses = board.gather(TIMEOUT.total_seconds())
    assert sum(status.phase == "" for status in statuses) == 0, "a rank has not published where it is"


def _forked(work: Callable[[], list[Rehearsed]]) -> Callable[[], list[Rehearsed]]:
    """Run `work` in a forked process; return a function that waits for its result."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(reader)
            setattr(meeting, "unpacked", _Once())  # noqa: B010 - the type checker wants a function
            with os.fdopen(writer, "w") as pipe:
                json.dump([vars(one) for one in work()], pipe)
        finally:
            os._exit(0)
    os.close(writer)

    def result() -> list[Rehearsed]:
        with os.fdopen(reader) as pipe:
            text = pipe.read()
        os.waitpid(pid, 0)
        return [Rehearsed(**one) for one in json.loads(text)]

    return result


if __name__ == "__main__":
    sys.exit(main())
