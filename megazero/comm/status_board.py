"""Share the status of every rank through memory, so that others can read it when a rank no longer answers.

A hung run is silent: the ranks that wait know their operation, but not which rank is missing; the missing rank cannot
report, because it was killed, stopped, or is busy elsewhere. So each rank has a slot, a page of memory that it shares
with the parent that started it, and writes there its step, its phase and the last operation it began on each axis. This
costs about a microsecond per operation and needs no thread, no network and no cooperation: the parent reads all slots
(`launcher/diagnosis.py`). Ranks without such a parent publish their slots when a rank fails (`launcher/job_board.py`).
"""

import ctypes
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass

from megazero.comm.axes import LANES, P2P
from megazero.comm.processes import host_id, is_stopped


class _Lane(ctypes.Structure):
    """The last operation that a rank began on an axis; `open`: the number of operations there that have not ended."""

    _fields_ = (
        ("number", ctypes.c_uint64),
        ("open", ctypes.c_uint16),
        ("first", ctypes.c_uint32),
        ("stride", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("text", ctypes.c_char * 160),
    )


class _Page(ctypes.Structure):
    """The memory of a slot; `last`: the lane of the last operation begun, from 1 (0: none); `near`: see `host_id`."""

    _fields_ = (
        ("state", ctypes.c_uint8),
        ("last", ctypes.c_uint8),
        ("pid", ctypes.c_uint32),
        ("step", ctypes.c_uint64),
        ("near", ctypes.c_uint64),
        ("phase", ctypes.c_char * 48),
        ("host", ctypes.c_char * 64),
        ("message", ctypes.c_char * 1000),
        ("lanes", _Lane * len(LANES)),
    )


SLOT_SIZE = mmap.PAGESIZE
assert ctypes.sizeof(_Page) <= SLOT_SIZE

# Phases before the first step: the ranks meet; the run has its folder, and is built; the built run trains.
START, BUILD, TRAIN = "start", "build", "train"

# States of a rank.
EMPTY, RUNNING, FAILED, STUCK, DONE, STOPPED = range(6)  # stopped: by a signal, before it trained
ON_DEVICE = "device"  # the message of a rank that is stuck in work queued on its GPU; else "AXIS axis: why"


@dataclass(frozen=True)
class Operation:
    """A collective as one rank began it.

    Attributes:
        axis: its axis' name.
        number: 1, 2, ... on that axis of that rank.
        open: it, or one begun before it on the axis, has not ended.
        ranks: the global ranks that take part.
        text: operation, purpose, dtype and shape.
    """

    axis: str
    number: int
    open: bool
    ranks: range
    text: str

    def __str__(self) -> str:
        return f"{self.axis} #{self.number} {self.text}"


@dataclass(frozen=True)
class RankStatus:
    """The content of a rank's slot. `step` is 0 before the first; `last` is the last operation begun.

    Attributes:
        is_here: its process is on this host, and this process can see it.
    """

    rank: int
    state: int
    pid: int
    step: int
    phase: str
    host: str
    operations: tuple[Operation, ...]
    last: Operation | None
    message: str
    is_here: bool = False

    @property
    def is_stopped(self) -> bool:
        """Return whether its process is known to be stopped by a signal or a debugger."""
        return self.is_here and is_stopped(self.pid)

    @property
    def has_said(self) -> bool:
        """Return whether it failed and reported why; a rank that failed because another did reports nothing."""
        return self.state == FAILED and self.message != ""

    @property
    def place(self) -> str:
        """Return phase and host, in words."""
        return f"in {self.phase} on {self.host}"

    def on(self, axis: str) -> Operation:
        """Return the last operation that it began on an axis."""
        return self.operations[LANES.index(axis)]

    @property
    def open(self) -> Operation | None:
        """Return the operation that this rank is in; None: it is in none."""
        return next((operation for operation in self.operations if operation.open), None)


class StatusBoard:
    """The slots of all ranks, in memory that only this process and the processes it forks share."""

    def __init__(self, size: int = 1):
        self._memory, self.size = mmap.mmap(-1, size * SLOT_SIZE), size

    def status_slot(self, rank: int) -> "StatusSlot":
        """Return the slot of a rank, for that rank to write."""
        return StatusSlot(self, rank)

    def read(self, rank: int) -> RankStatus:
        """Return the status that a rank last wrote."""
        page = self.page(rank)
        operations = []
        for axis, lane in zip(LANES, page.lanes, strict=True):
            stride, size = max(lane.stride, 1), min(lane.size, self.size)  # a broken file may hold any number
            ranks = range(lane.first, lane.first + size * stride, stride)
            operations.append(Operation(axis, lane.number, lane.open > 0, ranks, _text(lane.text)))
        last = operations[page.last - 1] if 0 < page.last <= len(LANES) else None
        here = page.pid > 0 and page.near == host_id()
        texts = _text(page.phase), _text(page.host)
        message = _text(page.message)
        return RankStatus(rank, page.state, page.pid, page.step, *texts, tuple(operations), last, message, here)

    def page(self, rank: int) -> _Page:
        """Return the memory of a rank's slot."""
        return _Page.from_buffer(self._memory, rank * SLOT_SIZE)

    def read_all(self) -> list[RankStatus]:
        """Return the status of every rank."""
        return [self.read(rank) for rank in range(self.size)]

    def raw(self, rank: int) -> bytes:
        """Return a slot's memory, without the zeros at its end."""
        return self._memory[rank * SLOT_SIZE : (rank + 1) * SLOT_SIZE].rstrip(b"\0")

    def fill(self, rank: int, raw: bytes) -> None:
        """Set a slot to what `raw` has returned on another host."""
        self._memory[rank * SLOT_SIZE : (rank + 1) * SLOT_SIZE] = raw[:SLOT_SIZE].ljust(SLOT_SIZE, b"\0")

    def introduce(self, rank: int, state: int, step: int, pid: int, host: str, near: int) -> None:
        """Fill a slot, which must be empty, with the known facts of a rank that does not write its slot itself.

        Args:
            state: RUNNING, FAILED, ...
            host, near: the host's name, and its `host_id`.
        """
        page = self.page(rank)
        page.state, page.step, page.pid = state, step, pid
        page.host, page.near = _bytes(host, 64), near


class StatusSlot:
    """The slot of one rank on a board.

    Attributes:
        board: the board that it is on.
    """

    def __init__(self, board: StatusBoard, rank: int):
        self._attach(board, rank)

    def _attach(self, board: StatusBoard, rank: int) -> None:
        self.board, self._rank, self._page = board, rank, board.page(rank)
        self._lanes = dict(zip(LANES, self._page.lanes, strict=True))

    def take(self, host: str) -> None:
        """Claim the slot for this process, on the host named `host`."""
        page = self._page
        ctypes.memset(ctypes.addressof(page), 0, ctypes.sizeof(page))
        page.state, page.pid, page.near = RUNNING, os.getpid(), host_id()
        page.phase, page.host = START.encode(), _bytes(host, 64)

    def move(self, board: StatusBoard, rank: int) -> None:
        """Move to another board, and copy the slot's content there."""
        content = bytes(self._page)
        self._attach(board, rank)
        ctypes.memmove(ctypes.addressof(self._page), content, len(content))

    def now(self, step: int, phase: str) -> None:
        """Set the step (from 1) and the phase of this rank."""
        self._page.step, self._page.phase = step, _bytes(phase, 48)

    def stall(self, unfinished: Iterable[tuple[str, range, str]]) -> None:
        """Show that this rank's GPU is stuck, and in which operations.

        Args:
            unfinished: (axis, ranks, text) of each. `begin` has recorded collectives already, so their axis alone is
                used; ranks and text are used for P2P.
        """
        for axis, ranks, text in unfinished:
            if axis == P2P:
                self.begin(P2P, ranks, text)
            else:
                self._lanes[axis].open = 1
        self.set_state(STUCK, ON_DEVICE)

    def set_state(self, state: int, message: str = "") -> None:
        """Set one of the states above; for FAILED, the message is the error line that the user sees."""
        self._page.message = _bytes(message, 1000)
        self._page.state = state

    def read(self) -> RankStatus:
        """Return the status as others see it."""
        return self.board.read(self._rank)

    def begin(self, axis: str, ranks: range, text: str) -> int:
        """Record the start of an operation; return its number on the axis."""
        lane = self._lanes[axis]
        lane.number = number = lane.number + 1
        lane.open += 1
        lane.first, lane.stride, lane.size, lane.text = ranks.start, ranks.step, len(ranks), _bytes(text, 160)
        self._page.last = LANES.index(axis) + 1
        return number

    def end(self, axis: str) -> None:
        """Record the end of one of the operations begun on the axis."""
        self._lanes[axis].open -= 1


def _bytes(text: str, most: int) -> bytes:
    return text.encode()[:most]


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")
