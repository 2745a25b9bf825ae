"""Share the status of every rank through memory, so that others can read it when a rank no longer answers.

A hung run is silent: the ranks that wait know what they wait for, not for which rank, and the missing rank cannot
report, because it was killed, stopped, or is busy elsewhere. So each rank has a slot, a page of memory shared with the
parent that started it or with the ranks of its host (never a file on a disk), and writes there its step, its phase and
the last operation it began on each axis. That costs about a microsecond per operation and needs no thread, no network
and no cooperation: any process that is left reads the slots of all (`launcher/diagnosis.py`).
"""

import hashlib
import mmap
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from megazero.comm import memfd
from megazero.comm.axes import LANES, P2P
from megazero.comm.processes import Process, host_id

if TYPE_CHECKING:
    from megazero.comm.device_queue import Queued

_HEAD = struct.Struct("<BBIq48s64s")  # state, axis of the last operation from 1, pid, step, phase, host
_IDENTITY, _IDENTITY_AT = struct.Struct("<Q8s"), 128  # start of the process, digest of the host's identity
_OPERATION = struct.Struct("<QHIII160s")  # number on its axis, how many are open, first rank, stride, size, text
_OPEN, _OPEN_AT = struct.Struct("<H"), 8
_OPERATIONS_AT = 192
_MESSAGE_AT = _OPERATIONS_AT + len(LANES) * _OPERATION.size
_MESSAGE = struct.Struct("<1000s")
SLOT_SIZE = mmap.PAGESIZE
assert _HEAD.size <= _IDENTITY_AT and _IDENTITY_AT + _IDENTITY.size <= _OPERATIONS_AT
assert _MESSAGE_AT + _MESSAGE.size <= SLOT_SIZE

# Phases before the first step: meeting the others; having a folder; what is built trains.
START, BUILD, TRAIN = "start", "build", "train"

# States of a rank.
EMPTY, RUNNING, FAILED, STUCK, DONE, STOPPED = range(6)  # stopped: by a signal, before it trained
ON_DEVICE = "device"  # the message of a rank that is stuck in what its GPU has queued; else it is an axis
_NAME = "megazero-board"


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
    """The content of a rank's slot. `step` is 0 before the first; `last` is the operation begun last.

    Attributes:
        process: of the rank, if it is on this host and this process can see it; else None.
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
    process: Process | None = None

    @property
    def is_stopped(self) -> bool:
        """Return whether its process is known to be stopped by a signal or a debugger."""
        return self.process is not None and self.process.is_stopped

    @property
    def has_said(self) -> bool:
        """Return whether it failed and said why; a rank that failed because another did says nothing."""
        return self.state == FAILED and self.message != ""

    def on(self, axis: str) -> Operation:
        return self.operations[LANES.index(axis)]

    @property
    def open(self) -> Operation | None:
        """Return the operation that this rank is in."""
        return next((operation for operation in self.operations if operation.open), None)


class StatusBoard:
    """The slots of all ranks, over shared memory."""

    def __init__(self, memory: mmap.mmap, size: int):
        self._memory, self.size = memory, size

    @classmethod
    def private(cls, size: int = 1) -> "StatusBoard":
        """Return a board in memory that only this process and the processes it forks share."""
        return cls(mmap.mmap(-1, size * SLOT_SIZE), size)

    @classmethod
    def shared(cls, size: int) -> tuple["StatusBoard", memfd.Handle]:
        """Return a board that other processes of this host can attach. Raises OSError."""
        memory, handle = memfd.make(_NAME, size * SLOT_SIZE)
        return cls(memory, size), handle

    @classmethod
    def attached(cls, handle: memfd.Handle, size: int) -> "StatusBoard":
        """Return the board that another process has made. Raises OSError: it cannot be had, or is none."""
        return cls(memfd.attach(handle, _NAME, size * SLOT_SIZE), size)

    def status_slot(self, rank: int) -> "StatusSlot":
        """Return the slot of a rank, for that rank to write."""
        return StatusSlot(self._memory, rank * SLOT_SIZE)

    def read(self, rank: int) -> RankStatus:
        """Return the status that a rank last wrote."""
        at = rank * SLOT_SIZE
        state, axis_from_1, pid, step, phase, host = _HEAD.unpack_from(self._memory, at)
        operations = []
        for i, axis in enumerate(LANES):
            number, still, first, stride, size, text = _OPERATION.unpack_from(
                self._memory, at + _OPERATIONS_AT + i * _OPERATION.size
            )
            size = min(size, self.size)  # whatever a broken file says
            ranks = range(first, first + size * max(stride, 1), max(stride, 1))
            operations.append(Operation(axis, number, still > 0, ranks, _text(text)))
        (message,) = _MESSAGE.unpack_from(self._memory, at + _MESSAGE_AT)
        last = operations[axis_from_1 - 1] if 0 < axis_from_1 <= len(LANES) else None
        started, near = _IDENTITY.unpack_from(self._memory, at + _IDENTITY_AT)
        here = pid > 0 and started > 0 and near == _here()
        process = Process(pid, started) if here else None
        texts = _text(phase), _text(host)
        return RankStatus(rank, state, pid, step, *texts, tuple(operations), last, _text(message), process)

    def read_all(self) -> list[RankStatus]:
        return [self.read(rank) for rank in range(self.size)]

    def raw(self, rank: int) -> bytes:
        """Return a slot's memory, without the zeros at its end."""
        return self._memory[rank * SLOT_SIZE : (rank + 1) * SLOT_SIZE].rstrip(b"\0")

    def fill(self, rank: int, raw: bytes) -> None:
        """Set a slot to what `raw` has returned on another host."""
        self._memory[rank * SLOT_SIZE : (rank + 1) * SLOT_SIZE] = raw[:SLOT_SIZE].ljust(SLOT_SIZE, b"\0")

    def introduce(self, rank: int, state: int, host: str, pid: int) -> None:
        """Set a slot to what is known of a rank that shows nothing itself."""
        self.fill(rank, _HEAD.pack(state, 0, pid, 0, b"", host.encode()[:64]))


class StatusSlot:
    """The slot of one rank on a board.

    Attributes:
        board: the board that it has moved to, which other ranks of the host can read.
    """

    def __init__(self, memory: mmap.mmap, at: int):
        self._memory, self._at = memory, at
        self.board: StatusBoard | None = None
        self._numbers: dict[str, int] = dict.fromkeys(LANES, 0)

    def take(self, host: str) -> None:
        """Claim the slot for this process, on the host of that name."""
        self._memory[self._at : self._at + SLOT_SIZE] = bytes(SLOT_SIZE)
        _HEAD.pack_into(self._memory, self._at, RUNNING, 0, os.getpid(), 0, START.encode(), host.encode()[:64])
        _IDENTITY.pack_into(self._memory, self._at + _IDENTITY_AT, Process.own().started, _here())

    def move(self, board: StatusBoard, rank: int) -> None:
        """Move to another board, and copy the slot's content there."""
        here = self._memory[self._at : self._at + SLOT_SIZE]
        self.board, self._memory, self._at = board, board._memory, rank * SLOT_SIZE
        self._memory[self._at : self._at + SLOT_SIZE] = here

    def now(self, step: int, phase: str) -> None:
        """Set the step (from 1) and the phase of this rank."""
        state, axis_from_1, pid, _, _, host = _HEAD.unpack_from(self._memory, self._at)
        _HEAD.pack_into(self._memory, self._at, state, axis_from_1, pid, step, phase.encode(), host)

    def stall(self, unfinished: "Iterable[Queued]") -> None:
        """Show that this rank's GPU does not go on, and in which operations: their lanes hold the newest of each."""
        for queued in unfinished:
            if queued.axis == P2P:
                self.begin(P2P, queued.ranks, queued.text)
            else:
                _OPEN.pack_into(self._memory, self._lane(queued.axis) + _OPEN_AT, 1)
        self.set_state(STUCK, ON_DEVICE)

    def set_state(self, state: int, message: str = "") -> None:
        """Set one of the states above; with the user's error line as the message when it is FAILED."""
        _MESSAGE.pack_into(self._memory, self._at + _MESSAGE_AT, message.encode()[:1000])
        self._memory[self._at] = state

    @property
    def step(self) -> int:
        """Return the step given to `now`; 0 before the first."""
        return _HEAD.unpack_from(self._memory, self._at)[3]

    @property
    def phase(self) -> str:
        """Return the phase given to `now`."""
        return _text(_HEAD.unpack_from(self._memory, self._at)[4])

    @property
    def state(self) -> int:
        return self._memory[self._at]

    @property
    def message(self) -> str:
        """Return the message given to `set_state`."""
        return _text(_MESSAGE.unpack_from(self._memory, self._at + _MESSAGE_AT)[0])

    @property
    def place(self) -> str:
        """Return phase and host, in words."""
        _, _, _, _, phase, host = _HEAD.unpack_from(self._memory, self._at)
        return f"in {_text(phase)} on {_text(host)}"

    def begin(self, axis: str, ranks: range, text: str) -> int:
        """Record the start of an operation; return its number on the axis."""
        number = self._numbers[axis] = self._numbers[axis] + 1
        at = self._lane(axis)
        (still,) = _OPEN.unpack_from(self._memory, at + _OPEN_AT)
        _OPERATION.pack_into(
            self._memory, at, number, still + 1, ranks.start, ranks.step, len(ranks), text.encode()[:160]
        )
        self._memory[self._at + 1] = LANES.index(axis) + 1
        return number

    def end(self, axis: str) -> None:
        """Record the end of one of the operations begun on the axis."""
        at = self._lane(axis) + _OPEN_AT
        (still,) = _OPEN.unpack_from(self._memory, at)
        _OPEN.pack_into(self._memory, at, still - 1)

    def _lane(self, axis: str) -> int:
        return self._at + _OPERATIONS_AT + LANES.index(axis) * _OPERATION.size


@cache
def _here() -> bytes:
    """Return a digest that is equal for processes that can see each other; a random one where the system has no id."""
    try:
        return hashlib.sha256(host_id().encode()).digest()[:8]
    except OSError:
        return os.urandom(8)


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")
