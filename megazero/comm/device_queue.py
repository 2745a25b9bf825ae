"""Follow the operations that a rank has queued on its GPU, so that another thread can tell whether they go on.

On NCCL the host queues an operation and goes on: that it has begun one, and even that it has waited for it, says
nothing about its end. What the host can know without waiting is `Work.is_completed`. But a work holds its tensors. So
it stands here only until the host makes a stream wait for it, which its caller keeps it for anyway; from then on a mark
in that stream, behind the wait, stands for it.

Operations of one communicator end in the order in which they were queued: where one has ended, those before it have.
A mark may also be held by what its stream waits for besides. Only the first one that the device has not passed, in the
order of the waits on all streams, is known to be held by its own operation.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from megazero.comm.readback import Mark, mark

_MOST = 4096  # operations of a communicator that are followed; no host runs so far ahead


class Work(Protocol):
    """An operation under way, as torch's process groups return it."""

    def is_completed(self) -> bool: ...


@dataclass(frozen=True)
class Waited:
    """A place in a stream behind the wait for an operation.

    Attributes:
        number: of the wait, in the order in which the host made streams wait.
    """

    number: int
    mark: Mark

    def is_completed(self) -> bool:
        return self.mark.query()


class _Call:
    """A call in which the host itself waits for other ranks."""

    def is_completed(self) -> bool:
        return False


@dataclass
class Queued:
    """An operation that a rank has queued on its GPU.

    Attributes:
        axis: its lane in the rank's status slot.
        ranks: the global ranks that it waits for.
        text: shown for a message; a collective's text is in its lane.
        work: None once it has ended.
    """

    axis: str
    ranks: range
    text: str
    work: Work | None

    @property
    def ended(self) -> bool:
        work = self.work  # once: the thread that trains may change it
        return work is None or work.is_completed()


class DeviceQueue:
    """The operations of one rank, put by the thread that trains and looked at by another.

    Args:
        marked: marks the end of a device's current stream, with a mark that was used before if there is one.
    """

    def __init__(self, marked: Callable[[torch.device, Mark | None], Mark | None] = mark) -> None:
        self._marked = marked
        self._used: deque[Mark] = deque()  # the other thread puts them, the one that trains takes them
        self._queues: dict[str, deque[Queued]] = {}  # by communicator
        self._put = self._ended = self._waits = 0

    def put(self, communicator: str, axis: str, ranks: range, work: Work, text: str = "") -> Queued:
        """Add the operation that was queued last on a communicator."""
        queued = Queued(axis, ranks, text, work)
        if (queue := self._queues.get(communicator)) is None:
            queue = self._queues[communicator] = deque(maxlen=_MOST)
        queue.append(queued)
        self._put += 1
        return queued

    def waited(self, queued: Queued, device: torch.device) -> None:
        """Let an operation's tensors go: the current stream of the device waits for it now."""
        place = self._marked(device, self._used.popleft() if self._used else None)
        self._waits += 1
        queued.work = None if place is None else Waited(self._waits, place)

    @contextmanager
    def calling(self, communicator: str, axis: str, ranks: range, text: str = "") -> Iterator[None]:
        """Follow a call in which the host waits for other ranks, as it does when it first uses a communicator."""
        queued = self.put(communicator, axis, ranks, _Call(), text)
        try:
            yield
        finally:
            queued.work = None

    @property
    def moves(self) -> tuple[int, int]:
        """Return numbers that change whenever an operation is queued, or found to have ended."""
        return self._put, self._ended

    def unfinished(self) -> Sequence[Queued]:
        """Return the operation that each communicator is in, where that is known; what a stream waits for comes last.

        For the other thread alone.
        """
        found: dict[str, Queued] = {}
        held: list[tuple[int, str, Queued]] = []  # by the order of the waits
        for communicator, queue in list(self._queues.items()):
            ended = bisect_left(queue, True, key=lambda queued: not queued.ended)
            for _ in range(ended):
                if isinstance(work := queue.popleft().work, Waited):
                    self._used.append(work.mark)
            self._ended += ended
            for queued in (queue[0], queue[-1]) if queue else ():
                work = queued.work
                if isinstance(work, Waited):
                    held.append((work.number, communicator, queued))
                elif not queued.ended:
                    found[communicator] = queued
        if held:
            _, communicator, queued = min(held, key=lambda one: one[0])
            found.pop(communicator, None)
            found[communicator] = queued
        return list(found.values())
