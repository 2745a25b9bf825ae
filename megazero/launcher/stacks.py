"""Write the stack of every thread of a rank into the rank's log, to explain a run that hangs.

A rank that gives up writes its own stacks. A rank that does not, because it waits in another operation or is busy, is
asked to write them: by its parent with a signal, whose handler (`faulthandler.register`) needs neither the interpreter
nor its lock, or, without a parent, by the alarm (`job_board.py`).
"""

import faulthandler
import signal
import traceback
from pathlib import Path
from typing import TextIO

ASK = signal.SIGRTMIN + 5  # no program sends it by accident


class Stacks:
    """The stacks of this rank, written to its log."""

    def __init__(self) -> None:
        self._log: TextIO | None = None

    def into(self, log: Path) -> None:
        """Append stacks to a file from here on. Raises OSError."""
        self._log = log.open("a", encoding="utf-8")
        faulthandler.register(ASK, file=self._log, all_threads=True)

    def write(self, error: BaseException | None = None, more: str = "") -> None:
        """Write where this rank gave up (`error`), the text `more`, and the stacks of all threads."""
        if self._log is not None:
            gave_up = ["gave up here:\n", *traceback.format_exception(error)] if error is not None else []
            self._log.write("".join(gave_up) + (more and f"{more}\n"))
            self._log.flush()
            faulthandler.dump_traceback(self._log, all_threads=True)

    def close(self) -> None:
        """Close the log; nothing is written afterwards."""
        if self._log is not None:
            faulthandler.unregister(ASK)
            self._log.close()
            self._log = None
