"""Record signals that ask a run to end, and act upon them between steps.

A scheduler that wants its machines back sends one and waits a while before it kills. Wherever it arrives, at all ranks
or one, once a run trains the handler only records it; the ranks agree on it after the step (`train/stopping.py`), save,
and end. Before the first step there is nothing to save or to agree on: the handler raises `StoppedEarly`, so that a run
ends within a second whatever it is building or waiting for. A user who interrupts twice does not want to wait: a second
SIGINT ends the process at once. (One that comes right behind the first is the same, delivered twice: to a process and
to its group.)
"""

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from megazero.base.stop_signals import NOTED, stopped_by

TWICE = 0.5  # seconds between two interruptions that are meant as two


class StoppedEarly(BaseException):
    """An exception for a signal that came before the run began to train.

    Attributes:
        number: of the signal.
    """

    def __init__(self, number: int):
        self.number = number
        super().__init__(stopped_by(number))


def noted() -> tuple[signal.Signals, ...]:
    """Return the signals that this process handles: SIGHUP not, where it was started with nohup."""
    return tuple(n for n in NOTED if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN)


class Signals:
    """The signals that came to a rank.

    Attributes:
        first: the first one that came; None: none has.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self._before: dict[int, object] = {}
        self._interrupted = math.inf  # when the first SIGINT came
        self._raises, self._held = True, False
        self._on_first: Callable[[str], object] | None = None

    def note(self) -> None:
        """Record signals from here on; the first one raises StoppedEarly. In the main thread."""
        for number in noted():
            self._before[number] = signal.signal(number, self._on)

    def only_note(self, on_first: Callable[[str], object]) -> None:
        """Record signals from here on without any other effect: the run trains.

        Args:
            on_first: called in the handler of the first one with a line for the user; may not write itself.
        """
        self._raises, self._on_first = False, on_first

    @contextmanager
    def held(self) -> Iterator[None]:
        """Delay a signal until the end of the context: the work inside must not be left half done."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self._raises and self.first is not None:
            raise StoppedEarly(self.first)

    def restore(self) -> None:
        """Restore the handlers from before `note`."""
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
        if self.first is not None:
            return
        self.first = signal.Signals(number)
        if self._raises and not self._held:
            raise StoppedEarly(number)
        if self._on_first is not None:
            self._on_first(
                f"{self.first.name} has come: the run ends after the step that is under way, and saves first"
            )
