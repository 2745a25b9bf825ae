"""Send messages between ranks of one host through shared memory.

Through a socket a message is copied four times and handled by four threads, in processor time that is taken from the
matrix products in parallel with them. Here the sender copies it once, into a slot of its
*outbox*, a piece of memory that the other ranks of the host have mapped, and then writes a label for it: tag, number,
place. Readers poll for the label they expect, read the message in the slot, and acknowledge it with one number; the
sender uses a slot again when all its readers have.

Labels are indexed by axis and by the operation's number there, so a reader polls one number, and carry the operation's
tag: a rank that called something else writes another tag, and never finds a reader.

A rank that waits, for a message or for a free slot, takes in what has come for its other rounds meanwhile, so that any
number of operations may be under way: no two ranks wait for each other.

Messages from one rank to one other (`p2p.py`) have slots of their own, so that neither kind ever waits for the other to
be read. A sender that finds none free keeps the message and goes on; a reader that waits takes whatever is for it,
expected or not, so that no message blocks those after it.

The memory has no name: a file descriptor that others open through /proc. It is gone with the last process that has it.
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
LABELS = 64  # of each axis; more than operations can be under way
_LABEL_WORDS = 3  # key, number, slot
_P2P_WORDS = 4  # key, key of what was read last, for whom, bytes
_SPINS = 300  # looks before sleeping between them
_NAP = 20e-6  # seconds; the kernel makes it some 70e-6
_SHORT_NAPS, _LONG_NAP = 200, 500e-6  # whoever waits for long need not look so often: others may need the core
_BETWEEN_ROLLS = 0.3  # seconds between looks at whether the others still live


def supported() -> bool:
    """Return whether this system is Linux on x86.

    Linux has descriptors one can open through /proc; x86 keeps a read before a later write, as readers need.
    """
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")


class Outbox:
    """An outbox in shared memory: slots for messages, labels of their content, and what each reader has read.

    Args:
        memory: of `size(readers)` bytes, zero at first.
        readers: ranks that may read.
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
        place: which round of the axis it is.
        tag: 31 bits that stand for the operation.
    """

    place: int
    tag: int

    @property
    def key(self) -> int:
        """Return a number that is never 0, which an empty entry holds, and never that of another round."""
        return self.place << 31 | self.tag

    def contradicts(self, key: int) -> bool:
        """Return whether an entry of this key is of another operation in the same round; an empty one is of none."""
        return key not in (0, self.key) and key >> 31 == self.place


@dataclass(frozen=True)
class Message:
    """A message as its reader finds it."""

    sender: int
    slot: int
    number: int


class OtherOperationError(RuntimeError):
    """An error for a rank whose message is of another operation than the one that was waited for."""

    def __init__(self, rank: int):
        super().__init__(f"rank {rank} has called another operation")
        self.rank = rank


class SharedMemoryTransport:
    """The outboxes of this rank and of the ranks that it can reach.

    Args:
        rank, size: of the world.
        timeout: how long to wait for a message, or for readers to make room.

    Attributes:
        descriptor: of this rank's outbox.

    Raises:
        OSError: the system allows no memory without a name.
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
        self.rounds: list[Callable[[], None]] = []  # each uses and acknowledges its messages if all have come
        # Messages for this rank alone, by sender and key: where one belongs, and what came before anybody expected it.
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
        """Write contiguous messages, one every `room` bytes, where `readers` find them under (axis, label).

        Raises:
            TimeoutError: no reader makes room.
        """
        row = self._own.labels[LANES.index(axis), label.place % LABELS]
        slot = self._wait(lambda: self._free_slot(int(row[1])), [k for _, waiting in self._awaited for k in waiting])
        self._number += 1
        self._awaited[slot] = (self._number, readers)
        for i, message in enumerate(messages):
            view_of(self._own.slots[slot], i * room, message).copy_(message)
        row[1], row[2] = self._number, slot
        row[0] = label.key  # last: whoever sees it sees the rest

    def find(self, sender: int, axis: str, label: Label) -> Message | None:
        """Return the message that `sender` has posted under (axis, label); None: not yet."""
        row = self._outboxes[sender].labels[LANES.index(axis), label.place % LABELS]
        return Message(sender, int(row[2]), int(row[1])) if row[0] == label.key else None

    def wait_for(self, sender: int, axis: str, label: Label) -> Message:
        """Wait for the message that `sender` posts under (axis, label).

        Raises:
            TimeoutError: it does not come, or the sender has died.
            OtherOperationError: the sender has posted something else in its place.
        """
        row = self._outboxes[sender].labels[LANES.index(axis), label.place % LABELS]

        def look() -> None:
            if label.contradicts(int(row[0])):
                raise OtherOperationError(sender)

        return self._wait(lambda: self.find(sender, axis, label), (sender,), look)

    def view(self, message: Message, start: int, like: Tensor) -> Tensor:
        """Return a view of the message `start` bytes into a slot: not to be written to, nor used once acknowledged."""
        return view_of(self._outboxes[message.sender].slots[message.slot], start, like)

    def acknowledge(self, message: Message) -> None:
        """Free the slot of a message in the sender's outbox."""
        self._outboxes[message.sender].read[message.slot, self.rank] = message.number

    def send(self, target: int, key: int, message: Tensor) -> bool:
        """Write a flat message where rank `target` finds it under `key`; return False if there is no room.

        Args:
            key: never 0, and never that of another message of this rank.
        """
        p2p = self._own.p2p
        free = next((i for i in range(P2P_SLOTS) if p2p[i, 0] == p2p[i, 1]), None)
        if free is None:
            return False
        view_of(self._own.slots[SLOTS + free], 0, message).copy_(message)
        p2p[free, 2], p2p[free, 3] = target, message.nbytes
        p2p[free, 0] = key  # last: whoever sees it sees the rest
        return True

    def collect(self, sender: int) -> None:
        """Take the messages that `sender` has for this rank, whether expected or not, and make room."""
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
        """Set the flat tensor that receives what `sender` hands over under `key`."""
        early = self.early.pop((sender, key), None)
        if early is None:
            self.expected[sender, key] = into
        else:
            into.copy_(early.view(into.dtype))

    def wait_until(self, ready: Callable[[], bool], sender: int) -> None:
        """Wait until `ready` is true, which needs `sender` to have done something.

        Raises:
            TimeoutError: `sender` has not done it in time, or has died.
        """
        self._wait(lambda: ready() or None, (sender,))

    def _free_slot(self, before: int) -> int | None:
        """Return the first slot that every reader has read: mostly one whose memory is still in the cache.

        None as long as message number `before` has not been read, whose label is to be written over.
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
        """Return the result of `ready` once it has one; TimeoutError when one of the ranks is gone or time is up.

        Args:
            look: called now and then; raises an error where waiting is in vain.
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
                if (gone or late) and (found := ready()) is not None:  # its last message, just before it left
                    return found
                if gone:
                    raise TimeoutError(f"rank {gone[0]} is gone")
                look()
                if late:
                    raise TimeoutError(f"no answer within {self._timeout:g} s")
        return found
