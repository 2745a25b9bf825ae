"""Write the stack of every thread of a rank into the rank's log: for a run that hangs.

A rank that gives up writes its own stacks. One that does not, because it waits in another operation or is busy, is
asked to by a signal, whose handler (`faulthandler.register`) needs neither the interpreter nor its lock. A stopped rank
writes them when it is continued.
"""

import faulthandler
import signal
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from megazero.comm.status_board import RUNNING, RankStatus

ASK = signal.SIGRTMIN + 5  # nobody sends it by accident
_WRITING = 0.5  # seconds that ranks have to write


class Stacks:
    """The stacks of this rank, written to its log."""

    def __init__(self) -> None:
        self._log: TextIO | None = None

    def into(self, log: Path) -> None:
        """Send stacks to the end of a file, which must exist. Raises OSError."""
        self._log = log.open("a", encoding="utf-8")
        faulthandler.register(ASK, file=self._log, all_threads=True)

    def write(self, error: BaseException, more: str = "") -> None:
        """Write where this rank gave up, what else is known, and where its other threads are."""
        if self._log is not None:
            self._log.write("gave up here:\n" + "".join(traceback.format_exception(error)) + (more and f"{more}\n"))
            self._log.flush()
            faulthandler.dump_traceback(self._log, all_threads=True)

    def close(self) -> None:
        """Close the log: nothing is written afterwards."""
        if self._log is not None:
            faulthandler.unregister(ASK)
            self._log.close()
            self._log = None


def ask_for_stacks(statuses: Sequence[RankStatus]) -> None:
    """Make the running ranks of this host and user write their stacks; give them time to."""
    running = [status.process for status in statuses if status.state == RUNNING and status.process is not None]
    if sum(process.send(ASK) for process in running):
        time.sleep(_WRITING)
