"""Ranks for tests: forked from this process, with gloo over the loopback and a file to meet at.

    results = run_ranks(4, function, argument, tensor=2)

calls `function(grid, argument)` on 4 ranks and returns what each returned, in rank order. The first rank that fails
ends the others and its traceback is the test's.

To fork ranks and to connect them takes longer than most tests. So ranks are kept, and do one call after the other, each
with a ledger of its own. Kept ranks know nothing of what has been patched since (pytest's `MonkeyPatch`): such a call
gets ranks of its own, and so does one whose function or arguments cannot be pickled.
"""

import gc
import multiprocessing
import os
import pickle
import traceback
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megazero.comm.context import CommContext
from megazero.comm.grid import Grid, make_grid, single
from megazero.comm.ledger import Ledger
from megazero.comm.status_board import StatusBoard
from megazero.launcher.environment import RankContext
from megazero.launcher.rendezvous import connect
from megazero.launcher.world import World

SLACK = 3.0  # seconds for the other ranks to say how they failed
TIMEOUT = timedelta(seconds=60)  # nothing here takes seconds, but a busy machine may
Axes = tuple[int, int, int | None]  # tensor, pipeline, shard ranks
Call = tuple[Axes, Callable[..., Any], tuple]


def run_ranks(
    size: int,
    function: Callable[..., Any],
    *arguments: Any,
    tensor: int = 1,
    pipeline: int = 1,
    shard: int | None = None,
    fresh: bool = False,
) -> list[Any]:
    """`function(grid, *arguments)` on each of `size` ranks; the data axis is what `tensor` and `pipeline` leave.

    Args:
        shard: data ranks over which ZeRO shards; None: all.
        fresh: in processes of their own, for a function that measures their memory, or leaves them as they should not
            be left.
    """
    if size == 1:
        return [function(single(), *arguments)]
    call = (tensor, pipeline, shard), function, arguments
    if not fresh and not PATCHES.are_new and (pickled := _pickled(call)) is not None:
        return _kept(size).do(pickled)
    ranks = _Ranks(size, call)
    try:
        return ranks.results()
    finally:
        ranks.end()


class Patches:
    """What all `MonkeyPatch`es of pytest have changed, counted."""

    def __init__(self) -> None:
        self._all = weakref.WeakSet[pytest.MonkeyPatch]()
        self._settled = 0
        honest = pytest.MonkeyPatch.__init__

        def init(patch: pytest.MonkeyPatch) -> None:
            honest(patch)
            self._all.add(patch)

        pytest.MonkeyPatch.__init__ = init  # type: ignore[method-assign]

    def settle(self) -> None:
        """What is changed now stays so for the whole session."""
        self._settled = self._count()

    @property
    def are_new(self) -> bool:
        return self._count() != self._settled

    def _count(self) -> int:
        return sum(len(one._setattr) + len(one._setitem) + (one._cwd is not None) for one in self._all)


PATCHES = Patches()


class _Ranks:
    """Forked processes, connected.

    Args:
        only: the one call that they do; None: those that `do` sends.
    """

    def __init__(self, size: int, only: Call | None = None):
        context = multiprocessing.get_context("fork")
        self._folder = TemporaryDirectory()
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            call = (rank, size, Path(self._folder.name) / "store", theirs, [*self._ends, ours], only)
            process = context.Process(target=_be, args=call, daemon=True)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def do(self, call: bytes) -> list[Any]:
        """What each rank returned of a pickled call; after a failure there are no ranks any more."""
        try:
            for end in self._ends:
                end.send_bytes(call)
            return self.results()
        except BaseException:
            self.end()
            raise

    def results(self) -> list[Any]:
        results: dict[int, Any] = {}
        failed: dict[int, str] = {}  # in the order in which ranks said so: the first is mostly the cause
        while missing := [rank for rank in range(len(self._ends)) if rank not in results and rank not in failed]:
            seconds = SLACK if failed else TIMEOUT.total_seconds() * 2
            ready = wait([self._ends[rank] for rank in missing], timeout=seconds)
            if failed and not ready:
                break
            assert ready, f"ranks {missing} do not answer"
            for rank in missing:
                if (end := self._ends[rank]) in ready:
                    try:
                        went_well, result = pickle.loads(end.recv_bytes())
                    except EOFError:
                        went_well, result = False, "ended without a word"
                    (results if went_well else failed)[rank] = result
        assert not failed, "\n".join(f"rank {rank}: {text}" for rank, text in failed.items())
        return [results[rank] for rank in range(len(self._ends))]

    def end(self) -> None:
        for process, end in zip(self._processes, self._ends, strict=True):
            process.kill()
            process.join()
            end.close()
        self._processes, self._ends = [], []
        self._folder.cleanup()

    @property
    def are_there(self) -> bool:
        return bool(self._processes) and all(process.is_alive() for process in self._processes)


_KEPT: dict[int, _Ranks] = {}


def _kept(size: int) -> _Ranks:
    if size not in _KEPT or not _KEPT[size].are_there:
        _KEPT[size] = _Ranks(size)
    return _KEPT[size]


def end_kept_ranks() -> None:
    """End the ranks that wait for calls, for a test that needs their memory."""
    while _KEPT:
        _KEPT.popitem()[1].end()


def _pickled(call: Call) -> bytes | None:
    try:
        return pickle.dumps(call)
    except (pickle.PicklingError, AttributeError, TypeError):  # a function inside of another
        return None


def _be(rank: int, size: int, store: Path, end: Connection, of_parent: list[Connection], only: Call | None) -> None:
    """A rank's life."""
    for other in of_parent:  # an end that somebody else holds too would not tell that this process's parent is gone
        other.close()
    try:
        torch.set_num_threads(1)
        place = RankContext(World(rank, size, rank, "local"), StatusBoard().status_slot(0), store)
        comm = connect(place, timeout=TIMEOUT, fingerprint="test")
        grids: dict[Axes, Grid] = {}
        gc.freeze()  # what was there before the fork: to look through it would copy it
        while True:
            axes, function, arguments = only or pickle.loads(end.recv_bytes())
            if axes not in grids:
                tensor, pipeline, shard = axes
                sizes = {"tensor": tensor, "pipeline": pipeline, "shard_ranks": shard}
                own = replace(comm, status_slot=StatusBoard().status_slot(0), _rounds=_From(len(grids) << 24))
                grids[axes] = make_grid(comm=own, device_type="cpu", **sizes)
            grid = grids[axes].with_comm(_with_ledger(grids[axes].comm))
            result = pickle.dumps((True, function(grid, *arguments)))  # a pipe's `send` would share tensors' memory
            _take_in(comm)
            dist.barrier()  # nobody leaves while others still talk
            end.send_bytes(result)
            if only is not None:
                break
    except EOFError:  # the parent has ended
        pass
    except BaseException:
        end.send_bytes(pickle.dumps((False, traceback.format_exc())))
    end.close()
    os._exit(0)


class _From(Counter[str]):
    """Numbers of rounds from a first one on: those of several grids go through the same memory, and must differ."""

    def __init__(self, first: int):
        super().__init__()
        self._first = first

    def __missing__(self, axis: str) -> int:
        return self._first


def _take_in(comm: CommContext) -> None:
    """Take in what others have sent and nobody has waited for: it fills the room of the next call's messages."""
    if comm.shared_memory is not None:
        for take_in in list(comm.shared_memory.rounds):
            take_in.__self__.finish()  # type: ignore[attr-defined]
        comm.shared_memory.rounds.clear()


def _with_ledger(comm: CommContext) -> CommContext:
    """The same connections, with nothing counted but what they hold themselves."""
    ledger = Ledger()
    for category, held in comm.ledger.bytes.items():
        ledger.hold(category, held.now)
    return replace(comm, ledger=ledger)
