"""Define the signals that stop a run, the exit code, and the handlers that end a process without a run."""

import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType
from typing import Any

from megazero.base.answers import tell

NOTED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
REQUEUE = 75  # exit code of a run that has saved its state and can be started again (EX_TEMPFAIL of sysexits.h)


def stopped_by(number: int) -> str:
    """Return the stop reason of a run that a signal ended, such as "stopped by SIGTERM"."""
    return f"stopped by {signal.Signals(number).name}"


def ended_by(number: int) -> str:
    """Return the message of a command that a signal ended: "ended by SIGTERM", or "interrupted" for SIGINT."""
    return "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"


def handle(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> dict[int, Any]:
    """Install a handler for the signals that stop a run, except an ignored SIGHUP (nohup); return the old handlers."""
    numbers = (n for n in NOTED if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN)
    return {number: signal.signal(number, handler) for number in numbers}


def restore(before: Mapping[int, Any]) -> None:
    """Restore handlers from `handle`; ignore signals that had `end_at_once` or `end_silently`: the result is final."""
    for number, handler in before.items():
        signal.signal(number, signal.SIG_IGN if handler in (end_at_once, end_silently) else handler)


def end_at_once(number: int, frame: FrameType | None) -> None:
    """Handle a signal by ending the process; an exception could be lost inside an import."""
    clear = "\r\x1b[K" if os.isatty(1) else ""  # remove the heartbeat's live line
    with suppress(OSError):
        os.write(1, f"{clear}{stopped_by(number)} before the first step, nothing to save\n".encode())
    os._exit(REQUEUE)


def end_silently(number: int, frame: FrameType | None) -> None:
    """Handle a signal as `end_at_once` does, but without a message: for ranks other than the first."""
    os._exit(REQUEUE)


def end_by(number: int, frame: object = None) -> None:
    """End the command because of a signal."""
    tell(ended_by(number))
    raise SystemExit(128 + number)
