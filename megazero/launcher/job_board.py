"""Show ranks without a common parent what all ranks of the job are doing: those of a host in memory, others on failure.

The ranks of a host share a board in memory (`comm/status_board.py`), so that showing an operation never waits for a
disk or a network. The slots of other hosts are not needed until something fails. Then the rank that fails raises an
alarm in the store: each rank publishes its own slot and its neighbour's on the same host, which may be stopped, and one
rank reads them all. A rank of which nothing comes is known by host and process from the roll call.
"""

import contextlib
import json
import threading
import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from megazero.base.errors import FailedElsewhere, UserError
from megazero.comm.memfd import Handle
from megazero.comm.status_board import EMPTY, FAILED, RUNNING, RankStatus, StatusBoard
from megazero.launcher.diagnosis import SLOW
from megazero.launcher.meeting import Presence
from megazero.launcher.store import get

_ALARM = "alarm"
_WAITING = timedelta(days=20)  # of one wait: when it is over, torch writes a warning


class JobBoard(StatusBoard):
    """The board of one rank's host, and the way to the others.

    Args:
        board: of this host.
        here: the ranks that share it.
        store: that all ranks reach.
        rank: of this process.
        roll: all ranks, as they described themselves.
    """

    def __init__(self, board: StatusBoard, here: Sequence[int], store: Store, rank: int, roll: Sequence[Presence]):
        super().__init__(board._memory, board.size)
        self._here, self._store, self._rank, self._roll = here, store, rank, roll

    def listen(self) -> threading.Thread:
        """Wait for an alarm in a thread with a connection of its own, and publish where this rank is when it comes.

        A run calls it when its start is over: nobody else may let a process end while a thread waits in the store.
        """
        store: Any = self._store  # torch's description of the class lacks `clone`
        waiting = threading.Thread(target=self._listen, args=(store.clone(),), name="alarm", daemon=True)
        waiting.start()
        return waiting

    def raise_alarm(self) -> None:
        """Publish this rank's end, and make the others publish where they are. Raises DistError: the store is gone."""
        self._publish(self._store)
        self._store.set(_ALARM, "")

    def known(self, *, ended: bool = False) -> StatusBoard:
        """Return a board of what is known without the store: the slots of this host, host and process of the others.

        Args:
            ended: rank 0 has, and the store with it.
        """
        whole = StatusBoard.private(self.size)
        for rank, there in enumerate(self._roll):
            whole.introduce(rank, FAILED if ended and rank == 0 else RUNNING, there.host, there.pid)
        for rank in self._here:
            if self.read(rank).state != EMPTY:
                whole.fill(rank, self.raw(rank))
        return whole

    def gather(self) -> list[RankStatus]:
        """Return the status of every rank, of those on other hosts as far as they have published it."""
        whole = self.known()
        for rank in range(self.size):
            key = f"status/{rank}"
            if rank not in self._here and self._store.check([key]):
                whole.fill(rank, zlib.decompress(self._store.get(key)))
        return whole.read_all()

    def is_first(self, text: str) -> bool:
        """Return whether no other rank says the same."""
        return int(self._store.compare_set(f"said/{text}", "", str(self._rank))) == self._rank

    def _listen(self, store: Store) -> None:
        while True:
            try:
                store.wait([_ALARM], _WAITING)
                return self._publish(store)
            except dist.DistStoreError:  # no alarm in all that time
                continue
            except RuntimeError:  # rank 0 has ended with the store
                return None

    def _publish(self, store: Store) -> None:
        neighbour = self._here[(self._here.index(self._rank) + 1) % len(self._here)]
        for rank in {self._rank, neighbour}:
            if self.read(rank).state != EMPTY:  # else it has a board of its own
                packed: Any = zlib.compress(self.raw(rank))
                store.set(f"status/{rank}", packed)  # bytes, which torch's description of the method lacks


def job_board(store: Store, rank: int, roll: Sequence[Presence]) -> JobBoard:
    """Return the board of this rank's host, which the host's first rank makes; its own where that is not allowed.

    Raises:
        RuntimeError: the store does not answer in time.
    """
    near, size = roll[rank].host_id, len(roll)
    here = [other for other, there in enumerate(roll) if near and there.host_id == near] or [rank]
    board, handle = None, None
    with contextlib.suppress(OSError):  # a hardened kernel may forbid it
        if rank == here[0]:
            board, handle = StatusBoard.shared(size)
    if rank == here[0]:
        store.set(f"board/{rank}", json.dumps(handle))
    else:
        try:
            place = json.loads(get(store, [f"board/{here[0]}"])[0])
        except dist.DistError:  # rank 0 has ended with the store
            raise
        except RuntimeError:
            if rank != here[1]:
                raise FailedElsewhere(here[1], 311) from None
            there = roll[here[0]]
            what = f"did not answer in the meeting in start on {there.host} (pid {there.pid}); rank {rank} waited"
            raise UserError(311, what, SLOW, rank=here[0]) from None
        if place:
            with contextlib.suppress(OSError):
                board = StatusBoard.attached(Handle(*place), size)
    if board is None:
        board, here = StatusBoard.private(size), [rank]
    return JobBoard(board, here, store, rank, roll)
