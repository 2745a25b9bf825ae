"""Follow the operations that a rank has queued on its GPU, so that another thread can tell whether they go on.

On NCCL the host queues an operation and goes on: that it has begun one, and even that it has waited for it, says
nothing about its end. What the host can know without waiting is `Work.is_completed`. Operations of one communicator end
in the order in which they were queued, so of each communicator two are kept: the one that is looked at, and the newest.
The second takes the first one's place when that has ended, and none is kept once all have: a work holds its result.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Work(Protocol):
    """An operation under way, as torch's process groups return it."""

    def is_completed(self) -> bool: ...


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


class DeviceQueue:
    """The operations of one rank, put by the thread that trains and looked at by another."""

    def __init__(self) -> None:
        self._looked_at: dict[str, Queued] = {}  # by communicator
        self._newest: dict[str, Queued] = {}
        self._put = self._ended = 0

    def put(self, communicator: str, axis: str, ranks: range, work: Work, text: str = "") -> None:
        """Add the operation that was queued last on a communicator."""
        self._newest[communicator] = Queued(axis, ranks, text, work)
        self._put += 1

    @property
    def moves(self) -> tuple[int, int]:
        """Return numbers that change whenever an operation is queued, or found to have ended."""
        return self._put, self._ended

    def unfinished(self) -> Sequence[Queued]:
        """Return the operation that each communicator is in, of those that have one. For the other thread alone."""
        found = []
        for communicator, newest in list(self._newest.items()):
            looked_at = self._looked_at.setdefault(communicator, newest)
            if looked_at.work is not None and looked_at.work.is_completed():
                looked_at.work = None
                self._ended += 1
            if looked_at.work is None and looked_at is not newest:
                looked_at = self._looked_at[communicator] = newest
            if looked_at.work is not None:
                found.append(looked_at)
        return found
