"""Ranks for tests: forked from this process, with gloo over the loopback and a file to meet at.

    results = run_ranks(4, function, argument, tensor=2)

calls `function(grid, argument)` on 4 ranks and returns what each returned, in rank order. The first rank that fails
ends the others and its traceback is the test's.
"""

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from megazero.comm.grid import Grid, make_grid, single
from megazero.comm.status_board import StatusBoard
from megazero.launch.environment import RankContext, World
from megazero.launch.rendezvous import connect

TIMEOUT = timedelta(seconds=60)  # nothing here takes seconds, but a busy machine may


def run_ranks(
    size: int,
    function: Callable[..., Any],
    *arguments: Any,
    tensor: int = 1,
    pipeline: int = 1,
    shard: int | None = None,
) -> list[Any]:
    """`function(grid, *arguments)` on each of `size` ranks; the data axis is what `tensor` and `pipeline` leave.

    Args:
        shard: data ranks over which ZeRO shards; None: all.
    """
    if size == 1:
        return [function(single(), *arguments)]
    context = multiprocessing.get_context("fork")
    with TemporaryDirectory() as folder:
        ends: list[Connection] = []
        processes = []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            call = (rank, size, Path(folder) / "store", (tensor, pipeline, shard), function, arguments, theirs)
            process = context.Process(target=_be, args=call, daemon=True)
            process.start()
            theirs.close()
            ends.append(ours)
            processes.append(process)
        try:
            return _results(ends)
        finally:
            for process, end in zip(processes, ends, strict=True):
                process.kill()
                process.join()
                end.close()


def _results(ends: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(ends):
        open_ends = [end for rank, end in enumerate(ends) if rank not in results]
        for end in wait(open_ends, timeout=TIMEOUT.total_seconds() * 2) or [None]:
            assert end is not None, f"ranks {sorted(set(range(len(ends))) - results.keys())} do not answer"
            rank = ends.index(end)
            try:
                went_well, result = pickle.loads(end.recv_bytes())
            except EOFError:
                went_well, result = False, "ended without a word"
            assert went_well, f"rank {rank}: {result}"
            results[rank] = result
    return [results[rank] for rank in range(len(ends))]


def _be(
    rank: int,
    size: int,
    store: Path,
    axes: tuple[int, int, int | None],
    function: Callable[..., Any],
    arguments: tuple,
    end: Connection,
) -> None:
    try:
        torch.set_num_threads(1)
        place = RankContext(World(rank, size, rank, "local"), StatusBoard.private().status_slot(0), store)
        comm = connect(place, timeout=TIMEOUT, fingerprint="test")
        grid: Grid = make_grid(tensor=axes[0], pipeline=axes[1], shard_ranks=axes[2], comm=comm, device_type="cpu")
        end.send_bytes(pickle.dumps((True, function(grid, *arguments))))  # send would share tensors' memory
        dist.barrier()  # nobody leaves while others still talk
    except BaseException:
        end.send_bytes(pickle.dumps((False, traceback.format_exc())))
    end.close()
    os._exit(0)
