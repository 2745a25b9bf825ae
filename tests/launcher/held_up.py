"""Ranks of which one stops itself before the first step: python -m tests.launcher.held_up CASE RANK TIMEOUT SIZE [LOG].

Started by a local parent, or where the environment says so by srun. Every rank prints its process id, and those of srun
wait for a line; with LOG each has a file there for its stacks.
"""

import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from megazero.comm import grid
from megazero.comm.agreement import agree
from megazero.comm.status_board import BUILD, StatusSlot
from megazero.launcher import exit_status, rendezvous
from megazero.launcher.environment import RankContext, world_from_environment
from megazero.launcher.exit_status import outcome, say_why
from megazero.launcher.job_board import JobBoard
from megazero.launcher.spawn import run_local

WHERE: dict[str, tuple[Any, str]] = {
    "start": (rendezvous, "_presence"),
    "memory": (rendezvous, "_open_outboxes"),
    "group": (rendezvous.dist, "init_process_group"),
    "axes": (grid, "_group_of"),
}


for module in (rendezvous, exit_status):  # a store that does not answer is given up sooner
    setattr(module, "SLACK", 1.0)  # noqa: B010 - a constant to the type checker


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_before(owner: Any, name: str) -> None:
    honest = getattr(owner, name)

    def stopped(*arguments: Any, **named: Any) -> Any:
        stop()
        return honest(*arguments, **named)

    setattr(owner, name, stopped)


def stop_inside() -> None:
    """In an operation that it has begun, and not yet sent anything of."""
    begin = StatusSlot.begin

    def stopped(status_slot: StatusSlot, axis: str, ranks: range, text: str) -> int:
        number = begin(status_slot, axis, ranks, text)
        stop()
        return number

    setattr(StatusSlot, "begin", stopped)  # noqa: B010 - the type checker wants another name of the first argument


def spin() -> None:
    while True:
        pass


def hold_the_lock() -> None:
    """In C, with the interpreter's lock: backtracking without end."""
    import re

    re.match(r"(a+)+b", "a" * 60)


LAST: dict[str, Callable[[], None]] = {"build": stop, "inside": stop_inside, "spin": spin, "lock": hold_the_lock}


def be(place: RankContext, case: str, bad_rank: int, timeout: float, log: str = "") -> None:
    os.write(1, f"pid {os.getpid()}\n".encode())  # in one piece
    if place.world.launcher == "srun":
        sys.stdin.readline()  # until all are there: ranks wait a few seconds, imports may take longer
    bad = place.world.rank == bad_rank
    if bad and case in WHERE:
        stop_before(*WHERE[case])
    if log:
        path = Path(log) / f"rank_{place.world.rank:02d}.log"
        path.touch()
        place.stacks.into(path)
    comm = rendezvous.connect(place, timeout=timedelta(seconds=timeout), fingerprint="same")
    made = grid.make_grid(tensor=2, pipeline=1, comm=comm, device_type="cpu")
    agree(made["world"], torch.device("cpu"), lambda: None)
    comm.status_slot.now(0, BUILD)
    if isinstance(comm.status_slot.board, JobBoard):
        comm.status_slot.board.listen(place.stacks)
    if bad and case in LAST:
        LAST[case]()
    agree(made["world"], torch.device("cpu"), lambda: None)
    rendezvous.disconnect()


def main() -> int:
    case, bad_rank, timeout, size, *log = sys.argv[1:]
    arguments = (case, int(bad_rank), float(timeout), *log)
    world = world_from_environment()
    if world.size == 1:
        return run_local(int(size), lambda place: be(place, *arguments), lambda *_: None)
    place = RankContext.of(world)
    code = outcome(lambda: be(place, *arguments), place)
    if code:
        say_why(place)
    return code


if __name__ == "__main__":
    sys.exit(main())
