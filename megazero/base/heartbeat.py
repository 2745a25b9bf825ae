"""Show the current activity of a process when it has written nothing else for a while.

Code that may take long names its work with `doing` (`doing.py`). A thread shows it:

    ━━━━──────── validating 40/120  1 s    on a terminal: one live line below all others, removed at the end
    validating 40/120  35 s                elsewhere: one line per 30 s of silence, once the phase has lasted 30 s

A process has one heartbeat, `HEART`, which all code uses as it uses a logger. It is silent until `begin`, which only
commands call, and only on rank 0. Other writers write inside `paused`, so that lines do not interleave.
"""

import atexit
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from megazero.base.doing import ACTIVITIES, Activities

FIRST, SECOND = 0.6, 1.0  # on a terminal: seconds of silence before the first draw, and between two draws
QUIET = 30.0  # elsewhere: seconds that both the silence and the phase must last before a line
_LOOK = 0.2  # seconds between two ticks
_PATIENCE = 1.0  # seconds to wait for a write under way
_BAR = 12  # columns
_CLEAR = "\r\x1b[K"


class Heartbeat:
    """A thread that shows the current activity when nothing else is written. Silent until `begin`."""

    def __init__(self, activities: Activities):
        self._activities, self._clock, self._lock = activities, activities.clock, threading.RLock()
        self._stream: TextIO | None = None
        self._redraws = self._drawn = False  # the stream is a terminal; the live line is on it
        self._wrote = 0.0
        self._promised = ""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, stream: TextIO | None, what: str) -> None:
        """Start the heartbeat.

        Args:
            stream: the output; None (it was closed before the process started): stay silent.
            what: the activity until another one is named.
        """
        self._stream, self._wrote = stream, self._clock()
        self._redraws = stream is not None and stream.isatty()
        self._activities.now(what)
        atexit.register(self.end)
        self.resume()

    def end(self) -> None:
        """Stop the heartbeat for the rest of the process."""
        self.pause()
        self._stream = None

    def pause(self) -> None:
        """Remove the line and end the thread. Call it before a fork, which copies locks but no threads."""
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
            # The thread inherits the signal mask: it must not receive signals, nor those the main thread blocks later.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            self._thread.start()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let other code write lines: remove the live line first, and draw it again below them."""
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
        """Write a line at the next tick; for signal handlers, which must not write themselves."""
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
        """Write a text; stay silent after the first write that fails."""
        try:
            if self._stream is not None:
                self._stream.write(text)
                self._stream.flush()
        except (OSError, ValueError):
            self._stream = None

    def _draw(self) -> None:
        """Draw the live line, cut to the terminal's width."""
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
