"""Name the signals that ask a run to end and its exit code, and end a process that has no run yet."""

import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType
from typing import Any

NOTED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
REQUEUE = 75  # the exit code that says: saved, start me again (EX_TEMPFAIL of sysexits.h)


def stopped_by(number: int) -> str:
    """Return the reason of a run that a signal ends, in words: "stopped by SIGTERM"."""
    return f"stopped by {signal.Signals(number).name}"


def ended_by(number: int) -> str:
    """Return the last words of a command that a signal ends: "ended by SIGTERM"."""
    return "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"


def handle(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> dict[int, Any]:
    """Handle the signals that end a run, except a SIGHUP that nohup ignores; return the handlers from before."""
    numbers = (n for n in NOTED if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN)
    return {number: signal.signal(number, handler) for number in numbers}


def restore(before: Mapping[int, Any]) -> None:
    """Restore handlers; a process that signals would have ended at once has its outcome by now, and ignores them."""
    for number, handler in before.items():
        signal.signal(number, signal.SIG_IGN if handler in (end_at_once, end_silently) else handler)


def end_at_once(number: int, frame: FrameType | None) -> None:
    """Handle a signal by ending the process: an exception in the middle of an import may be lost."""
    clear = "\r\x1b[K" if os.isatty(1) else ""  # the line that shows what the run does
    with suppress(OSError):
        os.write(1, f"{clear}{stopped_by(number)} before the first step, nothing to save\n".encode())
    os._exit(REQUEUE)


def end_silently(number: int, frame: FrameType | None) -> None:
    """Handle a signal as `end_at_once` does, on a rank other than the first one."""
    os._exit(REQUEUE)
