"""Name what this process is doing that may take long; the heartbeat (`heartbeat.py`) shows it.

There is one list for a process, and it is reached from everywhere as a logger is: see there.
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
        detail: the current part of it; one line shows several.
        done, total: the progress, where it is known.
        began, changed: by the clock, when it began, and when its part did.
    """

    what: str
    detail: str = ""
    done: int = 0
    total: int | None = None
    began: float = 0.0
    changed: float = 0.0

    def advance(self, count: int = 1) -> None:
        """Add `count` to what is done."""
        self.done += count

    @property
    def progress(self) -> str:
        return f" {self.done:,}/{self.total:,}" if self.total else ""


class Activities:
    """The activities of a process, the innermost last."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self._entries: list[Doing] = []

    def restart(self, what: str) -> None:
        """Forget all, and begin with an activity that lasts until another one is named."""
        self._entries = [self._new(what)]

    @property
    def current(self) -> Doing | None:
        """Return the innermost activity."""
        return self._entries[-1] if self._entries else None

    @contextmanager
    def doing(self, what: str, total: int | None = None) -> Iterator[Doing]:
        """Name an activity that may take long while the context is open; yield its progress counter."""
        entry = self._new(what, total)
        if threading.current_thread() is threading.main_thread():  # others work beside what the process waits for
            self._entries.append(entry)
        try:
            yield entry
        finally:
            if entry in self._entries:  # `restart` forgets all
                self._entries.remove(entry)

    def now(self, what: str, detail: str) -> None:
        """Set what the process does from here on, until the next call."""
        if not self._entries:
            self._entries.append(self._new(""))
        base, now = self._entries[0], self.clock()
        if base.what != what:
            base.what, base.began = what, now
        base.detail, base.changed = detail, now

    def _new(self, what: str, total: int | None = None) -> Doing:
        now = self.clock()
        return Doing(what, total=total, began=now, changed=now)


ACTIVITIES = Activities()
doing = ACTIVITIES.doing
