"""Show ranks without a common parent what all ranks of the job are doing: those of a host in memory, others on failure.

The ranks of a host share a board in memory (`comm/status_board.py`), so that showing an operation never waits for a
disk or a network. The slots of other hosts are not needed until something fails. Then the rank that fails wakes all
others through the store: each publishes its own slot and its neighbour's on the same host, which may be stopped, and
one rank reads them all. A rank of which nothing comes is known by host and process from the roll call.
"""

import atexit
import base64
import contextlib
import hashlib
import json
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from typing import Any

from torch._C._distributed_c10d import Store

from megazero.comm.memfd import Handle
from megazero.comm.status_board import EMPTY, FAILED, RUNNING, SLOT_SIZE, STUCK, RankStatus, StatusBoard
from megazero.launcher.attendance import Presence
from megazero.launcher.roll_call import absent, came, elected, values
from megazero.store.client import JobStore, NoAnswer

_ALARM, _TOLD = "alarm", "told"
_AGAIN, _SELDOM = 0.1, 2.0  # seconds before the store is asked again: one that has waited, one that answers at once
_WAITING = 60.0  # seconds of one wait
_ENDING = 3.0  # seconds that the end of a process waits for the thread
_TELLING = 3.0  # seconds that a rank may take to read what all have published


class JobBoard(StatusBoard):
    """The board of one rank's host, and the way to the others.

    Args:
        board: of this host.
        here: the ranks that share it.
        store: that all ranks reach.
        rank: of this process.
        roll: all ranks, as they described themselves.
    """

    def __init__(self, board: StatusBoard, here: Sequence[int], store: Store, rank: int, roll: Mapping[int, Presence]):
        super().__init__(board._memory, board.size)
        self._here, self._store, self._rank, self._roll = here, store, rank, roll
        self._gone: RuntimeError | None = None  # why the store is not asked again

    def listen(self) -> threading.Thread:
        """Start to wait for an alarm in a thread, which publishes where this rank is when there is one.

        Called when the start is over: until then ranks that are missing are found by other means (`lobby.py`), and the
        waiting takes a connection to the store of each rank. A thread that asks one of torch's stores ends before the
        interpreter does.
        """
        store: Any = self._store  # torch's description of the class lacks `clone`
        over = threading.Event()
        waiting = threading.Thread(target=self._listen, args=(store.clone(), over), name="alarm", daemon=True)

        def end() -> None:
            over.set()
            waiting.join(_ENDING)

        if not isinstance(store, JobStore):  # whose thread waits in Python, where the interpreter may leave it
            atexit.register(end)
        waiting.start()
        return waiting

    def raise_alarm(self) -> None:
        """Publish this rank's end, and make the others publish where they are."""
        try:
            self._publish(self._store)
            self._store.set(_ALARM, "")
        except RuntimeError as error:  # rank 0 has ended with the store, or does not answer
            self._gone = error

    def gather(self) -> list[RankStatus]:
        """Return the status of every rank, of those on other hosts as far as it is known."""
        whole = StatusBoard.private(self.size)
        for rank, there in self._roll.items():
            whole.introduce(rank, RUNNING, there.host, there.pid)
        try:
            for rank, raw in self._published() if self._gone is None else ():
                whole.fill(rank, raw)
        except RuntimeError as error:
            self._gone = error
        if self._gone is not None and isinstance(self._store, JobStore) and not isinstance(self._gone, NoAnswer):
            whole.introduce(0, FAILED, self._roll[0].host, self._roll[0].pid)  # with whom it ended
        for rank in self._here:
            if self.read(rank).state != EMPTY:
                whole.fill(rank, self.raw(rank))
        return whole.read_all()

    def is_first(self, text: str) -> bool:
        """Return whether no other rank says the same; where the store is gone, none of this host."""
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        if self._gone is None:
            with contextlib.suppress(RuntimeError):
                return elected(self._store, f"said/{digest}", self._rank) == self._rank
        own = self.read(self._rank)
        same = (one for one in map(self.read, self._here) if one.state == own.state)
        return next(one.rank for one in same if one.message == own.message or own.state == STUCK) == self._rank

    def tell(self) -> None:
        """Let the ranks go that wait in `until_told`."""
        with contextlib.suppress(RuntimeError):
            if self._gone is None:
                self._store.set(_TOLD, "")

    def until_told(self) -> None:
        """Wait for the rank that reports for all: a launcher may end all ranks with the first one."""
        with contextlib.suppress(RuntimeError):
            if self._gone is None:
                came(self._store, _TOLD, _TELLING)

    def _listen(self, store: Store, over: threading.Event) -> None:
        with contextlib.suppress(RuntimeError):  # rank 0 has ended with the store
            while not _alarmed(store):
                if over.wait(_AGAIN if isinstance(store, JobStore) else _SELDOM):
                    return
            self._publish(store)

    def _publish(self, store: Store) -> None:
        neighbour = self._here[(self._here.index(self._rank) + 1) % len(self._here)]
        for rank in dict.fromkeys((self._rank, neighbour)):
            if self.read(rank).state == EMPTY:  # it has a board of its own
                continue
            raw = base64.b85encode(zlib.compress(self.raw(rank))).decode()
            store.set(f"status/{store.add('statuses', 1)}", f"{rank} {raw}")

    def _published(self) -> Iterator[tuple[int, bytes]]:
        """Yield ranks and their slots, older ones first."""
        number = self._store.add("statuses", 0)
        missing = set(absent(self._store, "status", range(1, number + 1)))
        keys = [f"status/{at}" for at in range(1, number + 1) if at not in missing]
        for said in values(self._store, keys):
            rank, _, raw = said.decode(errors="replace").partition(" ")
            if rank.isdecimal() and int(rank) < self.size:
                yield int(rank), _unpacked(raw)


def job_board(store: Store, rank: int, roll: Mapping[int, Presence]) -> JobBoard:
    """Return the board of this rank's host, which the host's first rank makes; its own where that is not allowed.

    Raises:
        RuntimeError: the store does not answer in time.
    """
    near, size = roll[rank].host_id, len(roll)
    here = [other for other, there in roll.items() if near and there.host_id == near] or [rank]
    try:
        if rank == here[0]:
            board = _made(store, rank, size)
        else:
            pid, *place = map(int, json.loads(store.get(f"board/{here[0]}")))
            if pid != roll[here[0]].pid:
                raise ValueError("it is another process'")
            board = StatusBoard.attached(Handle(pid, *place), size)
    except (OSError, ValueError, TypeError):  # a hardened kernel may forbid it, or it is not what was announced
        board, here = StatusBoard.private(size), [rank]
    return JobBoard(board, here, store, rank, roll)


def _alarmed(store: Store) -> bool:
    """Return whether there was an alarm.

    Our own client waits for one, in Python. torch's stores are only asked: they wait outside of Python, where a thread
    must not be when the interpreter ends, and write a warning whenever time is up.
    """
    return came(store, _ALARM, _WAITING) if isinstance(store, JobStore) else store.check([_ALARM])


def _made(store: Store, rank: int, size: int) -> StatusBoard:
    """Make the board of a host, and tell the others where it is; in any case tell them something."""
    said = ""
    try:
        board, handle = StatusBoard.shared(size)
        said = json.dumps(astuple(handle))
    finally:
        store.set(f"board/{rank}", said)
    return board


def _unpacked(raw: str) -> bytes:
    try:
        return zlib.decompressobj().decompress(base64.b85decode(raw), SLOT_SIZE)
    except (ValueError, zlib.error):
        return b""
