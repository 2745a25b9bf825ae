"""Ranks of which one misbehaves: python -m tests.launcher.faulty CASE RANK TIMEOUT SIZE.

Every rank prints its process id, then does steps of a few operations on both axes of a grid of tensor 2. In step 3
`RANK` does what `CASE` says.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch

from megazero.base.errors import UserError
from megazero.comm.agreement import agree
from megazero.comm.collectives import all_gather, all_reduce
from megazero.comm.grid import Grid, make_grid
from megazero.launcher.environment import RankContext
from megazero.launcher.rendezvous import connect, disconnect
from megazero.launcher.spawn import run_local

STEPS, BAD_STEP = 5, 3


def fair(grid: Grid) -> None:
    all_reduce(torch.ones(8), grid["tensor"], "block forward")


def shape(grid: Grid) -> None:
    all_reduce(torch.ones(7), grid["tensor"], "block forward")


def dtype(grid: Grid) -> None:
    all_reduce(torch.ones(8, dtype=torch.float64), grid["tensor"], "block forward")


def skip(grid: Grid) -> None:
    pass


def extra(grid: Grid) -> None:
    all_gather(torch.ones(2), grid["tensor"], "extra")
    fair(grid)


def sleep(grid: Grid) -> None:
    os.write(1, b"asleep\n")
    time.sleep(600)


def wait_forever(grid: Grid) -> None:
    while True:
        pass


def failing(error: Exception) -> Callable[[Grid], None]:
    def fail(grid: Grid) -> None:
        raise error

    return fail


def refuse_together(grid: Grid) -> None:
    def refuse() -> None:
        raise UserError(205, "a bad token", "use another file", where="data.bin")

    agree(grid["world"], torch.device("cpu"), refuse)


CASES: dict[str, Callable[[Grid], None]] = {
    "none": fair,
    "kill": lambda grid: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda grid: os.kill(os.getpid(), signal.SIGSEGV),
    "stop": lambda grid: os.kill(os.getpid(), signal.SIGSTOP),
    "spin": wait_forever,
    "sleep": sleep,
    "shape": shape,
    "dtype": dtype,
    "skip": skip,
    "extra": extra,
    "leave": lambda grid: sys.exit(0),
    "exit": lambda grid: os._exit(3),
    "error": failing(ValueError("no such thing")),
    "user-error": failing(UserError(205, "a bad token", "use another file", where="data.bin")),
    "agree": refuse_together,
}


def be(place: RankContext, case: str, bad_rank: int, timeout: float) -> None:
    os.write(1, f"pid {os.getpid()}\n".encode())  # in one piece
    comm = connect(place, timeout=timedelta(seconds=timeout), fingerprint="same")
    grid = make_grid(tensor=2, pipeline=1, comm=comm, device_type="cpu")
    for step in range(1, STEPS + 1):
        comm.status_slot.now(step, "forward")
        all_gather(torch.ones(2), grid["tensor"], "loss")
        if step == BAD_STEP and case == "agree" and grid["world"].rank != bad_rank:
            agree(grid["world"], torch.device("cpu"), lambda: None)
        if step == BAD_STEP and grid["world"].rank == bad_rank:
            CASES[case](grid)
        else:
            fair(grid)
        comm.status_slot.now(step, "update")
        all_reduce(torch.ones(8), grid["data"], "gradients")
    disconnect()


def main() -> int:
    case, bad_rank, timeout, size = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    return run_local(size, lambda place: be(place, case, bad_rank, timeout), lambda *_: None)


if __name__ == "__main__":
    sys.exit(main())
