"""End a command at once on a signal, and leave nothing behind.

A signal raises `Interrupted` wherever the command is, but inside `held`, where state must be cleaned up first: there it
is recorded, and raised when that is done. An exception that comes while a library is imported may be lost; the record
is not, and the next `check` raises it again.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from megazero.base.heartbeat import HEART
from megazero.base.stop_signals import NOTED, REQUEUE, stopped_by
from megazero.launcher.signals import noted


class Interrupted(BaseException):
    """An exception that ends the command, because a signal asked for it.

    Attributes:
        exit_code: 128 + its number.
    """

    def __init__(self, number: int):
        self.exit_code = 128 + number
        name = signal.Signals(number).name
        super().__init__("interrupted" if number == signal.SIGINT else f"ended by {name}")


class Interruption:
    """The first signal that came to a command, if any did."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._held = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Handle signals inside the context. In the main thread."""
        before = {number: signal.signal(number, self._on) for number in noted()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Delay a signal until the end of the context; `run_local`, which unblocks signals, handles its own."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, NOTED)
        self._held = True
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            self._held = False
        self.check()

    def end(self, number: int) -> NoReturn:
        """Record a signal and raise Interrupted, when the cleanup for it is done."""
        self._note(number)
        raise Interrupted(number)

    def check(self) -> None:
        """Raise Interrupted if a signal has come."""
        if self._number is not None:
            raise Interrupted(self._number)

    def _on(self, number: int, frame: FrameType | None) -> None:
        self._note(number)
        if not self._held:
            self.check()

    def _note(self, number: int) -> None:
        if self._number is None:
            self._number = number


@contextmanager
def ended_at_once(*, speaks: bool) -> Iterator[None]:
    """Let a signal end this process at once, while a run has nothing yet: neither a folder nor other ranks.

    An exception would not do: while a library is imported it may be lost, or come out as another one.

    Args:
        speaks: report it on standard output.
    """

    def end(number: int, frame: FrameType | None) -> None:
        HEART.end()
        if speaks:
            with suppress(OSError):
                os.write(1, f"{stopped_by(number)} before the first step, nothing to save\n".encode())
        os._exit(REQUEUE)

    before = {number: signal.signal(number, end) for number in noted()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
