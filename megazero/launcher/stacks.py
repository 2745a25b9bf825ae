"""Write the stack of every thread of a rank into the rank's log: for a run that hangs.

A rank that gives up writes its own stacks. One that does not, because it waits in another operation or is busy, is
asked to by a signal: Python's handler of it is C code that needs neither the interpreter nor its lock, so that a rank
writes its stacks even while a library keeps the lock. A stopped rank cannot; it does when it is continued.
"""

import faulthandler
import signal
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from megazero.comm.status_board import RUNNING, RankStatus

ASK = signal.SIGRTMIN + 5 if hasattr(signal, "SIGRTMIN") else None  # nobody sends it by accident
_LONGEST = 1.0  # seconds to wait for ranks to begin to write
_WRITING = 0.1  # seconds for those that have begun
_POLL = 0.01


class Stacks:
    """The stacks of this rank, written to its log."""

    def __init__(self) -> None:
        self._log: TextIO | None = None

    def into(self, log: Path) -> None:
        """Send stacks to the end of a file, which must exist. Raises OSError."""
        self._log = log.open("a", encoding="utf-8")
        if ASK is not None:
            faulthandler.register(ASK, file=self._log, all_threads=True)

    def write(self, error: BaseException, more: str = "") -> None:
        """Write where this rank gave up, what else is known, and where its other threads are."""
        if self._log is None:
            return
        self._log.write("gave up here:\n" + "".join(traceback.format_exception(error)) + (more and f"{more}\n"))
        self._log.flush()
        faulthandler.dump_traceback(self._log, all_threads=True)

    def close(self) -> None:
        """Close the log: nothing is written afterwards."""
        if self._log is not None:
            if ASK is not None:
                faulthandler.unregister(ASK)
            self._log.close()
            self._log = None


def ask_for_stacks(statuses: Sequence[RankStatus]) -> None:
    """Make the running ranks of this host and user write their stacks; wait until they have."""
    if ASK is None:
        return
    asked = [s.process for s in statuses if s.state == RUNNING and s.process is not None and s.process.send(ASK)]
    deadline = time.monotonic() + _LONGEST
    while any(p.has_waiting(ASK) and not p.is_stopped for p in asked) and time.monotonic() < deadline:
        time.sleep(_POLL)
    if asked:
        time.sleep(_WRITING)
