"""The ranks of one job of the check: python -m scripts.gpu_check.rank FOLDER.

FOLDER/job.json says how many ranks there are, on which device, whether they share it, and what they do: train layouts
one after the other, or measure the speed of stages. Ranks that share a GPU do it as `train.py --share-gpus` lets them;
others talk through NCCL, on a CPU through shared memory.

This process imports all that is needed, touches no GPU, and forks the ranks. Each has a log; the last line that is
printed says what went wrong, if something did.
"""

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from megazero.base.errors import UserError
from megazero.comm.context import CommContext
from megazero.comm.grid import Grid, make_grid, single
from megazero.comm.status_board import StatusBoard
from megazero.comm.transport.host_staging import staging_pool
from megazero.launcher.environment import RankContext, World
from megazero.launcher.rendezvous import connect, disconnect
from megazero.tools.certify.rank import write_results
from scripts.gpu_check import exchange
from scripts.gpu_check.findings import Asked
from scripts.gpu_check.layouts import Case, exact, train

TIMEOUT = timedelta(seconds=60)  # a step takes a moment, but the first one on a GPU loads its kernels
_FORK = multiprocessing.get_context("fork")


def main() -> int:
    folder = Path(sys.argv[1])
    job = json.loads((folder / "job.json").read_text())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which ends the ranks
    return run(job["size"], lambda rank: be(rank, job, folder), folder)


def run(size: int, rank_of: Callable[[int], None], folder: Path) -> int:
    """Run the ranks until all have ended or one has failed; print their logs, and return the exit code."""
    logs = [folder / f"rank-{rank}.log" for rank in range(size)]
    ranks = [_FORK.Process(target=_logged, args=(rank_of, rank, logs[rank]), daemon=True) for rank in range(size)]
    failed: list[int] = []
    try:
        for process in ranks:
            process.start()
        while not failed and any(process.is_alive() for process in ranks):
            time.sleep(0.02)
            failed = [rank for rank, process in enumerate(ranks) if process.exitcode]
        codes = [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.join()
        texts = [log.read_text(errors="replace").rstrip() for log in logs if log.exists()]
        print("\n".join(filter(None, texts)), flush=True)
    if failed:
        last = texts[failed[0]].splitlines()[-1:]
        print(": ".join([f"rank {failed[0]} ended with {codes[failed[0]]}", *last]))
    return 1 if failed else 0


def _logged(rank_of: Callable[[int], None], rank: int, log: Path) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with log.open("wb") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    rank_of(rank)


def be(rank: int, job: dict[str, Any], folder: Path) -> None:
    """Do one rank's part of a job."""
    size, shares = job["size"], job["shares_gpus"]
    world = World(rank, size, rank, "local", shares_gpus=shares)
    if world.device.type != job["device"]:
        raise UserError(340, f"asked for {job['device']}, torch has {world.device.type}", "see --device")
    comm = connect(
        RankContext(world, StatusBoard.private().status_slot(0), folder / "store"), timeout=TIMEOUT, fingerprint="check"
    )
    if shares and comm.host_staging is None and size > 1:
        comm = replace(comm, host_staging=staging_pool(world.device, comm.ledger))
    if "stages" in job:
        _measure(job, comm, world, folder)
    else:
        _train(job, comm, world, folder)
    if comm.host_staging is not None and rank == 0:
        held = comm.ledger.bytes["host_bounce"].peak
        print(
            f"{size} ranks on {world.device}: each sent {comm.ledger.bytes_sent:,} bytes through {held:,} of the host"
        )
    disconnect()


def _train(job: dict[str, Any], comm: CommContext, world: World, folder: Path) -> None:
    exact(world.device)
    for layout in [Case(**layout) for layout in job["layouts"]]:
        grid = _grid(comm, world, tensor=layout.job.tensor, pipeline=layout.job.pipeline)
        out = folder / layout.folder
        out.mkdir(exist_ok=True)
        write_results(train(layout, grid, world.device), out, world.rank)


def _measure(job: dict[str, Any], comm: CommContext, world: World, folder: Path) -> None:
    asked, rows = Asked(world.device, job["tiny"]), []
    for stage in job["stages"]:
        name = f"stage {stage}, {world.size} ranks"
        rows.append(exchange.speed_of(stage, _grid(comm, world), asked, name))
    if world.rank == 0:
        (folder / "speeds.json").write_text(json.dumps(rows))


def _grid(comm: CommContext, world: World, *, tensor: int = 1, pipeline: int = 1) -> Grid:
    if world.size == 1:
        return single(comm)
    device_type = "cuda" if comm.backend == "nccl" else "cpu"
    return make_grid(comm=comm, device_type=device_type, tensor=tensor, pipeline=pipeline)


if __name__ == "__main__":
    sys.exit(main())
