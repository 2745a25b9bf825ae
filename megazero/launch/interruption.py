"""Signals that end a command at once, and leave nothing behind.

A signal raises `Interrupted` wherever the command is, but where it holds something that must be put away first: there
it is noted, and raised when that is done. An exception that comes while a library is imported may be lost on the way;
what was noted is not, and the next `check` raises it again.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from megazero.base.heartbeat import HEART
from megazero.launch.signals import NOTED, REQUEUE, noted, stopped_by


class Interrupted(BaseException):
    """A signal asked the command to end.

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
        """Mind signals inside. In the main thread."""
        before = {number: signal.signal(number, self._on) for number in noted()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let a signal that comes inside wait for the end; but `run_local`, which unblocks signals, minds its own."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, NOTED)
        self._held = True
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            self._held = False
        self.check()

    def end(self, number: int) -> NoReturn:
        """Raise Interrupted: a signal has come, and nothing is left of what it found."""
        self._note(number)
        raise Interrupted(number)

    def check(self) -> None:
        """Raises Interrupted if one has."""
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
    """Let a signal end this process where it is, a run that has nothing yet: neither a folder nor other ranks.

    An exception would not do: while a library is imported it may be lost, or come out as another one.

    Args:
        speaks: say that on standard output.
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
