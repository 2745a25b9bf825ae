"""Name what this process is doing that may take long; the heartbeat (`heartbeat.py`) shows it.

A process has one list of activities, `ACTIVITIES`, which code reaches from everywhere as it reaches a logger.
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
        what: the words to print: "validating".
        detail: its phase.
        done, total: its progress; total None: unknown.
        since: when it began, in seconds of the list's clock.
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
    """The activities of a process, the innermost last. The outermost is always there, and `now` sets it."""

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
        """Name an activity that may take long while the context is open; yield it, to count its progress."""
        entry = Doing(what, "", 0, total, self.clock())
        if threading.current_thread() is not threading.main_thread():  # no other thread waits for it
            yield entry
            return
        self._entries.append(entry)
        try:
            yield entry
        finally:
            self._entries.remove(entry)


ACTIVITIES = Activities()
doing = ACTIVITIES.doing
