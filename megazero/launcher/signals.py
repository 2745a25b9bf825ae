"""Handle the signals that ask a run to end.

Until a run has a folder or other ranks, `stop_signals.end_at_once` ends the process. Until the run trains, `Signals`
raises `StoppedEarly`, so that it ends within a second, whatever it builds or waits for. While it trains, the handler
only records the signal: the ranks agree on it after the step (`train/stopping.py`), save, and end.
When the outcome is settled, signals are ignored.

A second SIGINT ends the process at once. (One within TWICE seconds after the first is the same SIGINT, delivered to the
process and to its group.)
"""

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from megazero.base.stop_signals import handle, restore, stopped_by

TWICE = 0.5  # seconds between two SIGINTs that count as two


class StoppedEarly(BaseException):
    """An exception for a signal that came before the run began to train.

    Attributes:
        number: the number of the signal.
    """

    def __init__(self, number: int):
        self.number = number
        super().__init__(stopped_by(number))


class Signals:
    """The signals that came to a rank.

    Attributes:
        first: the first signal that came; or None.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self._before: dict[int, Any] = {}
        self._interrupted = math.inf  # when the first SIGINT came
        self._raises, self._held = True, False
        self._on_first: Callable[[str], object] = lambda line: None

    def note(self) -> None:
        """Start to record signals; the first one raises StoppedEarly. Call it in the main thread."""
        self._before = handle(self._on)

    def only_note(self, on_first: Callable[[str], object]) -> None:
        """Only record signals from here on, because the run trains.

        Args:
            on_first: called in the handler of the first signal with a line for the user; must not write itself.
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
        restore(self._before)

    def _on(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and now - self._interrupted > TWICE:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if number == signal.SIGINT:
            self._interrupted = min(now, self._interrupted)
        if self.first is not None:
            return
        self.first = signal.Signals(number)
        if not self._raises:
            self._on_first(f"{self.first.name} received: the run saves and ends after the current step")
        elif not self._held:
            raise StoppedEarly(number)
