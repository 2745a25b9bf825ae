"""Name the signals that ask a run to end, and the exit code of a run that did."""

import signal

NOTED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
REQUEUE = 75  # the exit code that says: saved, start me again (EX_TEMPFAIL of sysexits.h)


def stopped_by(number: int) -> str:
    """Return the reason in words: "stopped by SIGTERM"."""
    return f"stopped by {signal.Signals(number).name}"
