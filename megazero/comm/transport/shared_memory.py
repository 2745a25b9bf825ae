"""Send messages between ranks of one host through shared memory.

A socket copies a message four times, in four threads, which take processor time from the matrix products that run in
parallel. Here the sender copies it once, into a slot of its *outbox*, memory that the other ranks of the host have
mapped, and then writes a label for it: the round and the operation's tag, the message's number, its slot. Readers poll
for the label they expect, read the message in the slot, and acknowledge it by its number; the sender reuses a slot when
all its readers have acknowledged it.

Labels are indexed by axis and by the round's number there, so a reader polls one number. A rank that calls another
operation writes another tag, which no reader expects.

A rank that waits for a message or for a free slot meanwhile consumes the messages that have arrived for its other
rounds. So any number of operations may be under way, and no two ranks wait for each other.

Messages from one rank to one other (`p2p.py`) have slots of their own, so that neither kind ever waits for the other to
be read. A sender that finds none free keeps the message and goes on; a reader that waits takes every message for it,
expected or not, so that no message blocks later ones.

The memory has no name: other ranks open its file descriptor through /proc. It is freed with the last process that has
it.
"""

import mmap
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
from torch import Tensor

from megazero.comm.axes import LANES

T = TypeVar("T")
SLOTS, SLOT_BYTES = 8, 8 << 20
P2P_SLOTS = 4  # slots for messages to one rank
LABELS = 64  # of each axis; more than the operations that can be under way
_LABEL_WORDS = 3  # key, number, slot
_P2P_WORDS = 4  # key, key of the last message read, target, bytes
_SPINS = 300  # polls without sleep, at first
_NAP = 20e-6  # seconds; the kernel sleeps for about 70e-6
_SHORT_NAPS, _LONG_NAP = 200, 500e-6  # a long wait polls less often, as others may need the core
_BETWEEN_ROLLS = 0.3  # seconds between checks that the others are alive


def supported() -> bool:
    """Return whether this system is Linux on x86.

    Linux lets a process open another's descriptors through /proc; x86 keeps a read before a later write, as readers
    need.
    """
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")


class Outbox:
    """An outbox in shared memory: slots for messages, their labels, and the acknowledgements of each reader.

    Args:
        memory: `size(readers)` bytes, zero at first.
        readers: the number of ranks that may read.
    """

    def __init__(self, memory: mmap.mmap, readers: int):
        raw = torch.frombuffer(memory, dtype=torch.uint8)
        slots = SLOTS + P2P_SLOTS
        numbers = raw[slots * SLOT_BYTES :].view(torch.int64).numpy()
        labels, p2p = len(LANES) * LABELS * _LABEL_WORDS, P2P_SLOTS * _P2P_WORDS
        self.slots = raw[: slots * SLOT_BYTES].view(slots, SLOT_BYTES)
        self.labels = numbers[:labels].reshape(len(LANES), LABELS, _LABEL_WORDS)
        self.p2p = numbers[labels : labels + p2p].reshape(P2P_SLOTS, _P2P_WORDS)
        self.read = numbers[labels + p2p : labels + p2p + SLOTS * readers].reshape(SLOTS, readers)

    @staticmethod
    def size(readers: int) -> int:
        """Return the bytes of an outbox with so many readers."""
        numbers = len(LANES) * LABELS * _LABEL_WORDS + P2P_SLOTS * _P2P_WORDS + SLOTS * readers
        return (SLOTS + P2P_SLOTS) * SLOT_BYTES + -(-numbers * 8 // mmap.PAGESIZE) * mmap.PAGESIZE


def view_of(memory: Tensor, start: int, like: Tensor) -> Tensor:
    """Return a view of flat bytes, from byte `start` on, with the shape and dtype of `like`."""
    return memory[start : start + like.nbytes].view(like.dtype).view(like.shape)


@dataclass(frozen=True)
class Label:
    """The name of one round of messages on an axis.

    Attributes:
        place: the number of the round on the axis.
        tag: 31 bits that stand for the operation.
    """

    place: int
    tag: int

    @property
    def key(self) -> int:
        """Return a number that differs from 0, which marks an empty entry, and from the keys of other rounds."""
        return self.place << 31 | self.tag

    def contradicts(self, key: int) -> bool:
        """Return whether an entry with this key is of another operation of the same round; False if it is empty."""
        return key not in (0, self.key) and key >> 31 == self.place


@dataclass(frozen=True)
class Message:
    """A message as its reader finds it: in slot `slot` of the sender's outbox, as message number `number` of it."""

    sender: int
    slot: int
    number: int


class OtherOperationError(RuntimeError):
    """An error for a rank whose message belongs to another operation than the expected one."""

    def __init__(self, rank: int):
        super().__init__(f"rank {rank} has called another operation")
        self.rank = rank


class SharedMemoryTransport:
    """The outboxes of this rank and of the ranks that it can reach.

    Args:
        rank, size: of the world.
        timeout: how long to wait for a message, or for readers to make room.

    Attributes:
        descriptor: the file descriptor of this rank's outbox.

    Raises:
        OSError: the system allows no memory without a name (memfd).
    """

    def __init__(self, rank: int, size: int, timeout: timedelta):
        self.rank, self._size, self._timeout = rank, size, timeout.total_seconds()
        self.descriptor = os.memfd_create(f"megazero-{rank}")
        os.ftruncate(self.descriptor, Outbox.size(size))
        self._own = Outbox(mmap.mmap(self.descriptor, Outbox.size(size)), size)
        self._outboxes: dict[int, Outbox] = {}
        self._pids: dict[int, int] = {}
        self._number = 0
        self._awaited: list[tuple[int, Sequence[int]]] = [(0, ())] * SLOTS  # (number, readers) of each slot's message
        self.rounds: list[Callable[[], None]] = []  # each consumes and acknowledges its messages if all are there
        # Point-to-point messages for this rank by (sender, key): where expected ones go, and those that came too early.
        self.expected: dict[tuple[int, int], Tensor] = {}
        self.early: dict[tuple[int, int], Tensor] = {}
        self.reached: frozenset[int] = frozenset((rank,))

    def open(self, rank: int, pid: int, descriptor: int) -> None:
        """Map the outbox of another rank, from its process. Raises OSError: that is not allowed."""
        theirs = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
        try:
            self._outboxes[rank] = Outbox(mmap.mmap(theirs, Outbox.size(self._size)), self._size)
        finally:
            os.close(theirs)
        self._pids[rank] = pid

    def post(self, axis: str, label: Label, messages: Sequence[Tensor], room: int, readers: Sequence[int]) -> None:
        """Write contiguous messages into one slot, one every `room` bytes, for `readers` to find by (axis, label).

        Raises:
            TimeoutError: the readers make no room.
        """
        row = self._own.labels[LANES.index(axis), label.place % LABELS]
        slot = self._wait(lambda: self._free_slot(int(row[1])), [k for _, waiting in self._awaited for k in waiting])
        self._number += 1
        self._awaited[slot] = (self._number, readers)
        for i, message in enumerate(messages):
            view_of(self._own.slots[slot], i * room, message).copy_(message)
        row[1], row[2] = self._number, slot
        row[0] = label.key  # last: a reader that sees it sees the rest

    def find(self, sender: int, axis: str, label: Label) -> Message | None:
        """Return the message that `sender` has posted under (axis, label); None: not yet."""
        row = self._outboxes[sender].labels[LANES.index(axis), label.place % LABELS]
        return Message(sender, int(row[2]), int(row[1])) if row[0] == label.key else None

    def wait_for(self, sender: int, axis: str, label: Label) -> Message:
        """Wait for the message that `sender` posts under (axis, label).

        Raises:
            TimeoutError: it does not arrive, or the sender has died.
            OtherOperationError: the sender has posted a message of another operation in its place.
        """
        row = self._outboxes[sender].labels[LANES.index(axis), label.place % LABELS]

        def look() -> None:
            if label.contradicts(int(row[0])):
                raise OtherOperationError(sender)

        return self._wait(lambda: self.find(sender, axis, label), (sender,), look)

    def view(self, message: Message, start: int, like: Tensor) -> Tensor:
        """Return a message's slot from byte `start` on, viewed as `like`; read only, and only before `acknowledge`."""
        return view_of(self._outboxes[message.sender].slots[message.slot], start, like)

    def acknowledge(self, message: Message) -> None:
        """Free the slot of a message in the sender's outbox."""
        self._outboxes[message.sender].read[message.slot, self.rank] = message.number

    def send(self, target: int, key: int, message: Tensor) -> bool:
        """Write a flat message where rank `target` finds it under `key`; return False if there is no room.

        Args:
            key: not 0, and different from the key of every other message of this rank.
        """
        p2p = self._own.p2p
        free = next((i for i in range(P2P_SLOTS) if p2p[i, 0] == p2p[i, 1]), None)
        if free is None:
            return False
        view_of(self._own.slots[SLOTS + free], 0, message).copy_(message)
        p2p[free, 2], p2p[free, 3] = target, message.nbytes
        p2p[free, 0] = key  # last: a reader that sees it sees the rest
        return True

    def collect(self, sender: int) -> None:
        """Take the messages that `sender` has for this rank, expected or not, and free their slots."""
        outbox = self._outboxes[sender]
        for i, (key, read, target, size) in enumerate(outbox.p2p.tolist()):
            if key == read or target != self.rank:
                continue
            message = outbox.slots[SLOTS + i, :size]
            into = self.expected.pop((sender, key), None)
            if into is None:
                self.early[sender, key] = message.clone()
            else:
                into.copy_(message.view(into.dtype))
            outbox.p2p[i, 1] = key

    def expect(self, sender: int, key: int, into: Tensor) -> None:
        """Set the flat tensor that receives the message that `sender` sends under `key`."""
        early = self.early.pop((sender, key), None)
        if early is None:
            self.expected[sender, key] = into
        else:
            into.copy_(early.view(into.dtype))

    def wait_until(self, ready: Callable[[], bool], sender: int) -> None:
        """Wait until `ready` is true, which depends on an action of `sender`.

        Raises:
            TimeoutError: `sender` has not acted in time, or has died.
        """
        self._wait(lambda: ready() or None, (sender,))

    def _free_slot(self, before: int) -> int | None:
        """Return the first slot that all its readers have read; its memory is mostly still in the cache.

        Return None if there is none, or as long as message `before`, whose label will be overwritten, is unread.
        """
        free = None
        for slot, (number, readers) in enumerate(self._awaited):
            read = self._own.read[slot]
            if all(read[reader] >= number for reader in readers):
                free = slot if free is None else free
            elif number == before:
                return None
        return free

    def _wait(
        self, ready: Callable[[], T | None], ranks: Sequence[int], look: Callable[[], object] = lambda: None
    ) -> T:
        """Return the result of `ready` once it has one. Raises TimeoutError: one of the ranks is gone, or time is up.

        Args:
            look: called now and then; raises an error if the wait cannot succeed.
        """
        for _ in range(_SPINS):
            if (found := ready()) is not None:
                return found
        began = rolled = time.monotonic()
        naps = 0
        while (found := ready()) is None:
            for take_in in list(self.rounds):
                take_in()
            naps += 1
            time.sleep(_NAP if naps < _SHORT_NAPS else _LONG_NAP)
            now = time.monotonic()
            if now - rolled > _BETWEEN_ROLLS:
                rolled = now
                gone = [rank for rank in ranks if not os.path.exists(f"/proc/{self._pids[rank]}")]
                late = now - began > self._timeout
                if (gone or late) and (found := ready()) is not None:  # a message sent just before the end
                    return found
                if gone:
                    raise TimeoutError(f"rank {gone[0]} is gone")
                look()
                if late:
                    raise TimeoutError(f"no answer within {self._timeout:g} s")
        return found
