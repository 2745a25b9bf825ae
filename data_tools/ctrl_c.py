"""Hold Ctrl-C back for as long as a step takes that must not be cut in two."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ctrl_c_held() -> Iterator[None]:
    """Delay Ctrl-C until the end of the context; a process that is started inside inherits that it is blocked.

    Without it an interrupt during the first half second of a new process prints a traceback of its own. Blocking the
    signal in the main thread, which alone may call this, is not enough: another thread may take it, one of a library
    for example, and Python raises KeyboardInterrupt in the main thread then. So it is recorded, too.
    """
    came = False

    def record(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True

    handler = signal.signal(signal.SIGINT, record)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)
