"""Record the activities of this process that may take long, for the heartbeat (`heartbeat.py`) to show.

A process has one list of activities, `ACTIVITIES`, which all code uses as it uses a logger.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(eq=False)
class Doing:
    """An activity that may take long.

    Attributes:
        what: the name to print, for example "validating".
        detail: its phase.
        done, total: its progress; total None: unknown.
        since: its start time, in seconds of the list's clock.
    """

    what: str
    detail: str
    done: int
    total: int | None
    since: float

    def advance(self, count: int = 1) -> None:
        """Add `count` to the progress."""
        self.done += count

    def words(self, now: float) -> str:
        """Return the activity as text: "step 121/1,000 backward  31 s"."""
        progress = f" {self.done:,}/{self.total:,}" if self.total else ""
        return f"{self.what}{progress} {self.detail}".rstrip() + f"  {now - self.since:.0f} s"


class Activities:
    """The nested activities of a process, innermost last. The outermost always exists; `now` sets it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self._entries = [Doing("", "", 0, None, clock())]

    @property
    def current(self) -> Doing:
        """Return the innermost activity."""
        return self._entries[-1]

    def now(self, what: str, detail: str = "", done: int = 0, total: int | None = None) -> None:
        """Set the outermost activity, until the next call."""
        self._entries[0] = Doing(what, detail, done, total, self.clock())

    @contextmanager
    def doing(self, what: str, total: int | None = None) -> Iterator[Doing]:
        """Record an activity while the context is open; yield it, so that the caller can count its progress."""
        entry = Doing(what, "", 0, total, self.clock())
        if threading.current_thread() is not threading.main_thread():  # the user waits for the main thread only
            yield entry
            return
        self._entries.append(entry)
        try:
            yield entry
        finally:
            self._entries.remove(entry)


ACTIVITIES = Activities()
doing = ACTIVITIES.doing
