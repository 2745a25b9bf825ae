"""Show what a process is doing when nothing else has been written for a while.

Code that may take long names its work with `doing` (`doing.py`). A thread shows it:

    ━━━━──────── validating 40/120  1 s    a terminal: one live line below all others, removed at the end
    validating 40/120  35 s                anywhere else: one line in 30 s of silence, in a phase that is as long

A process has one heartbeat, `HEART`, which code reaches from everywhere as it reaches a logger. It is silent until
`begin`, which only commands call, and only on rank 0. Other writers write inside `paused`, so that lines do not tear
each other.
"""

import atexit
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from megazero.base.doing import ACTIVITIES, Activities

FIRST, SECOND = 0.6, 1.0  # on a terminal: seconds of silence before the line, and between two looks of it
QUIET = 30.0  # anywhere else: seconds of silence, and of a phase, before it is named
_LOOK = 0.2
_PATIENCE = 1.0  # seconds for a write under way
_BAR = 12  # columns
_CLEAR = "\r\x1b[K"


class Heartbeat:
    """A thread that shows the current activity when nothing else is written. Silent until `begin`."""

    def __init__(self, activities: Activities):
        self._activities, self._clock, self._lock = activities, activities.clock, threading.RLock()
        self._stream: TextIO | None = None
        self._redraws = self._drawn = False  # it is a terminal; the live line stands on it
        self._wrote = 0.0
        self._promised = ""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, stream: TextIO | None, what: str) -> None:
        """Start to show.

        Args:
            stream: the output; None (it was closed before the start): stay silent.
            what: the activity until another one is named.
        """
        self._stream, self._wrote = stream, self._clock()
        self._redraws = stream is not None and stream.isatty()
        self._activities.now(what)
        atexit.register(self.end)
        self.resume()

    def end(self) -> None:
        """Stop for good."""
        self.pause()
        self._stream = None

    def pause(self) -> None:
        """Remove the line and end the thread: a fork copies no threads, but would copy a lock that one holds."""
        thread, self._thread = self._thread, None
        self._stop.set()
        if thread is not None:
            thread.join(_PATIENCE)  # a signal handler may have interrupted a writer whose lock the thread waits for
        if self._lock.acquire(timeout=_PATIENCE):  # the thread may hang in a write to a stopped terminal
            self._clear()
            self._lock.release()

    def resume(self) -> None:
        """Start the thread, if there is a stream to write to."""
        if self._stream is not None and self._thread is None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
            # The thread inherits the mask: signals, also those that the main thread holds back later, are not for it.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            self._thread.start()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let other code write lines: the live line is removed first, and drawn again below them."""
        with self._lock:
            drawn = self._drawn
            self._clear()
            try:
                yield
            finally:
                self._wrote = self._clock()
                if drawn:
                    self._draw()

    def say(self, text: str) -> None:
        """Write a line at the next beat; for a signal handler, which may not write itself."""
        self._promised = text

    def tick(self) -> None:
        """Show the activity if it is due."""
        with self._lock:
            if self._promised:
                text, self._promised = self._promised, ""
                with self.paused():
                    self._write(f"{text}\n")
            now, current = self._clock(), self._activities.current
            if self._redraws:
                if now - self._wrote >= (SECOND if self._drawn else FIRST):
                    self._draw()
            elif min(now - self._wrote, now - current.since) >= QUIET:
                self._write(f"{current.words(now)}\n")
                self._wrote = now

    def _write(self, text: str) -> None:
        """Write a text; nothing more once the stream is closed."""
        try:
            if self._stream is not None:
                self._stream.write(text)
                self._stream.flush()
        except (OSError, ValueError):
            self._stream = None

    def _draw(self) -> None:
        """Draw the live line, as wide as the terminal is."""
        current, self._wrote, self._drawn = self._activities.current, self._clock(), True
        done = "━" * (_BAR * current.done // current.total) if current.total else ""
        line = f"{done:─<{_BAR}.{_BAR}} {current.words(self._wrote)}"
        self._write(_CLEAR + line[: shutil.get_terminal_size().columns - 1])

    def _clear(self) -> None:
        """Remove the live line."""
        if self._drawn:
            self._drawn = False
            self._write(_CLEAR)

    def _beat(self) -> None:
        while not self._stop.wait(_LOOK):
            self.tick()


HEART = Heartbeat(ACTIVITIES)
