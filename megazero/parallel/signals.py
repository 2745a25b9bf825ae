"""Signals that ask a run to end: noted when they come, acted upon between steps.

A scheduler that wants its machines back sends one and waits a while before it kills. Wherever it arrives, at all ranks
or one, in whatever phase, the handler only notes it; the ranks agree on it after the step (`stopping.py`), save, and
end. Who interrupts twice does not want to wait: a second SIGINT ends the process at once. (One that comes right behind
the first is the same, delivered twice: to a process and to its group.)
"""

import math
import os
import signal
import time
from types import FrameType

NOTED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
TWICE = 0.5  # seconds between two interruptions that are meant as two


def noted() -> tuple[signal.Signals, ...]:
    """Those that this process minds: not the end of its terminal, where it was started with nohup."""
    return tuple(n for n in NOTED if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN)


class Signals:
    """
    Attributes:
        first: the first one that came; None: none has.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self._before: dict[int, object] = {}
        self._interrupted = math.inf  # when the first SIGINT came

    def note(self) -> None:
        """From here on they are noted, and do nothing else. In the main thread."""
        for number in noted():
            self._before[number] = signal.signal(number, self._on)

    def restore(self) -> None:
        """They do again what they did before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()

    def _on(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and now - self._interrupted > TWICE:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if number == signal.SIGINT and self._interrupted == math.inf:
            self._interrupted = now
        if self.first is None:
            self.first = signal.Signals(number)
