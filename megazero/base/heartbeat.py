"""Show what a process is doing when nothing else has been written for a while.

Code that may take long names its work with `doing` (`doing.py`). A thread shows it:

    compiling the CPU kernels  12 s          a terminal: one live line, redrawn every second, cleared afterwards
    validating 40/120  35 s                  anywhere else: one line in 30 s of silence, in a phase that is as long

There is one heartbeat for a process, `HEART`, as there is one standard output, and it is reached from everywhere as a
logger is: handing it through every constructor between a command and a compiler would put it into forty signatures. It
is silent until `begin`, which only commands call, and only on rank 0. Other writers write inside `paused`, so that
lines do not tear each other. This file needs the standard library alone: importing torch is among the slow work.
"""

import atexit
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from megazero.base.doing import ACTIVITIES, Activities, Doing

FIRST, SECOND = 0.6, 1.0  # on a terminal: seconds of silence before the words, and between two looks of the line
QUIET = 30.0  # anywhere else: seconds of silence, and of a phase, before it is named
_LOOK = 0.2
_PATIENCE = 1.0  # seconds for a write under way


class Heartbeat:
    """A thread that shows the current activity when nothing else is written. Silent until `begin`."""

    def __init__(self, activities: Activities):
        self._activities, self._clock, self._lock = activities, activities.clock, threading.RLock()
        self._stream: TextIO | None = None
        self._redraws = self._drawn = False  # it is a terminal; the words stand on its line
        self._live: Callable[[str], object] | None = None
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
        self._stream = stream
        self._redraws = stream is not None and stream.isatty()
        self._wrote = self._clock()
        self._activities.restart(what)
        atexit.register(self.end)
        self.resume()

    def end(self) -> None:
        """Stop for good."""
        self.pause()
        self._stream = None

    def pause(self) -> None:
        """Clear the line and end the thread: before a fork, which copies no threads and would copy a taken lock."""
        thread, self._thread = self._thread, None
        self._stop.set()
        if thread is not None:
            thread.join(_PATIENCE)
        if (thread is None or not thread.is_alive()) and self._lock.acquire(timeout=_PATIENCE):
            try:  # a thread that hangs in a write has a reader who does not read: there is no line to clear
                self._clear()
            finally:
                self._lock.release()

    def resume(self) -> None:
        """Start the thread, if there is a stream to write to."""
        if self._stream is None or self._thread is not None:
            return
        self._stop.clear()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        # Inherited: a signal that the main thread holds back must not be taken here instead.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let other code write to the stream: the line is cleared first, and stays so before the context closes."""
        with self._lock:
            self._clear()
            try:
                yield
            finally:
                self._wrote = self._clock()

    def say(self, text: str) -> None:
        """Write a line at the next beat; for a signal handler, which may not write itself."""
        self._promised = text

    def show_on(self, live: Callable[[str], object] | None) -> None:
        """Pass the words to `live`, which redraws a line of its own; None: show them here again."""
        with self._lock:
            self._clear()
            self._live = live

    def tick(self) -> None:
        """Show the activity if it is due."""
        with self._lock:
            if self._stream is None:
                return
            now, current = self._clock(), self._activities.current
            if self._promised and self._live is None:
                self._clear()
                self._write(self._promised + "\n")
                self._promised = ""
            if current is None:
                return
            if self._redraws or self._live is not None:
                if now - self._wrote >= (SECOND if self._drawn else FIRST):
                    self._redraw(current)
            elif min(now - self._wrote, now - current.changed) >= QUIET:
                self._write(self._words(current) + "\n")

    def _words(self, current: Doing) -> str:
        seconds = f"{self._clock() - current.began:.0f} s"
        return f"{current.what} {current.detail}".rstrip() + f"{current.progress}  {seconds}"

    def _redraw(self, current: Doing) -> None:
        words, self._drawn = self._words(current), True
        if self._live is None:
            self._write(f"\r\x1b[2K{words[: self._columns() - 1]}")
            return
        self._wrote = self._clock()
        try:
            self._live(self._promised or words)
        except (OSError, ValueError):  # nobody reads any more
            self._live = None

    def _clear(self) -> None:
        """Clear the line on a terminal."""
        drawn, self._drawn = self._drawn, False
        if drawn and self._live is None:
            self._write("\r\x1b[2K")

    def _write(self, text: str) -> None:
        """Write a text; stop writing for good once the stream is closed."""
        self._wrote = self._clock()
        try:
            if self._stream is not None:
                self._stream.write(text)
                self._stream.flush()
        except (OSError, ValueError):
            self._stream = None

    def _columns(self) -> int:
        with suppress(OSError, ValueError, AttributeError):
            return max(20, os.get_terminal_size(self._stream.fileno()).columns)  # type: ignore[union-attr]
        return 80

    def _beat(self) -> None:
        while not self._stop.wait(_LOOK):
            self.tick()


HEART = Heartbeat(ACTIVITIES)
