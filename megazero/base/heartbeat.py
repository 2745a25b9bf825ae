"""Print a heartbeat: no command is silent for more than two seconds.

Code that may take longer names its work with `doing` (`doing.py`); one thread looks every quarter of a second, and
when nothing has been written for a while it writes what is being done:

    compiling the CPU kernels  12 s                      a terminal: one line, redrawn every second, cleared afterwards
    compiling the CPU kernels............ 12 s           anywhere else: the words once, then a dot a second
    step 3 forward.. backward.... update. 8 s            a step says its phases on one line
    step 4 forward, step 5 update, step 6 data 3 s       which short steps share
    validating.......... 40/120.......... 80/120 25 s    and now and then how far it is

There is one heartbeat for a process, `HEART`, as there is one standard output, and it is reached from everywhere as a
logger is: what a process is doing belongs to the process, and handing it through every constructor between a command
and a compiler would put it into forty signatures. It is silent until `begin`, which only commands call, and only on
rank 0. Other writers do so inside `paused`, so that lines do not tear each other. This file does without torch, because
importing it is among the slow work.
"""

import atexit
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from megazero.base.doing import ACTIVITIES, Activities, Doing

FIRST = 0.6  # seconds of silence before the words: within the first second, with some room for a busy machine
SECOND = 1.0  # between dots
_LOOK = 0.2
_PATIENCE = 1.0  # seconds for a write under way
_WIDTH = 100  # characters of a line with dots before it is ended
_PROGRESS_EVERY = 10  # dots


class Heartbeat:
    """A thread that prints the current activity when nothing else is written. Silent until `begin`."""

    def __init__(self, activities: Activities):
        self._activities, self._clock, self._lock = activities, activities.clock, threading.RLock()
        self._stream: TextIO | None = None
        self._redraws = False
        self._live: Callable[[str], object] | None = None
        self._wrote = 0.0
        self._open: Doing | None = None  # whose line has no end yet
        self._since = 0.0  # when what the line tells began
        self._shown, self._length, self._dots = ("", ""), 0, 0
        self._promised = ""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, stream: TextIO | None, what: str) -> None:
        """Start to print.

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
        """Stop printing for good."""
        self.pause()
        self._stream = None

    def pause(self) -> None:
        """Finish the line and end the thread: before a fork, which copies no threads and would copy a taken lock."""
        thread, self._thread = self._thread, None
        self._stop.set()
        if thread is not None:
            thread.join(_PATIENCE)
        if (thread is None or not thread.is_alive()) and self._lock.acquire(timeout=_PATIENCE):
            try:  # a thread that hangs in a write has a reader who does not read: there is no line to end
                self._close()
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
        """Let other code write to the stream: the open line ends first, and none begins before the context closes."""
        with self._lock:
            self._close()
            try:
                yield
            finally:
                self._wrote = self._clock()

    def say(self, text: str) -> None:
        """Write a line at the next beat; for a signal handler, which may not write itself."""
        self._promised = text

    def show_on(self, live: Callable[[str], object] | None) -> None:
        """Pass the words to `live`, which redraws a line of its own; None: print them here again."""
        with self._lock:
            self._close()
            self._live = live

    def tick(self) -> None:
        """Print the activity if it is due."""
        with self._lock:
            if self._stream is None:
                return
            now = self._clock()
            if self._promised and self._live is None:
                self._close()
                self._write(self._promised + "\n", now)
                self._promised = ""
            current = self._activities.current
            if current is None or now - self._wrote < (SECOND if self._open else FIRST):
                return
            if self._live is not None or self._redraws:
                self._redraw(current, now)
            else:
                self._dot(current, now)

    def _redraw(self, current: Doing, now: float) -> None:
        words = f"{current.what} {current.detail}".rstrip() + f"{current.progress}  {now - current.began:.0f} s"
        self._open = current
        if self._live is not None:
            self._wrote = now
            try:
                self._live(self._promised or words)
            except (OSError, ValueError):  # nobody reads any more
                self._live = None
            return
        self._write(f"\r\x1b[2K{words[: self._columns() - 1]}", now)

    def _dot(self, current: Doing, now: float) -> None:
        if self._open is not None and (self._open is not current or self._length > _WIDTH):
            self._close()
        what, detail = current.what, current.detail
        before, self._shown = self._shown, (what, detail)
        if self._open is None:
            self._open, self._since, self._dots = current, current.began, 0
            self._length = self._write(f"{what} {detail}".rstrip(), now)
        elif what != before[0]:
            self._length += self._write(f", {what} {detail}".rstrip(), now)
        elif detail != before[1]:
            self._length += self._write(f" {detail}", now)
        else:
            self._dots += 1
            self._length += self._write(".", now)
            if current.total and self._dots % _PROGRESS_EVERY == 0:
                self._length += self._write(current.progress, now)

    def _close(self) -> None:
        """End the open line."""
        ended, self._open = self._open, None
        if ended is None or self._live is not None:
            return
        now = self._clock()
        self._write("\r\x1b[2K" if self._redraws else f"{ended.progress} {now - self._since:.0f} s\n", now)

    def _write(self, text: str, now: float) -> int:
        """Write a text and return its length; stop writing for good once the stream is closed."""
        self._wrote = now
        try:
            if self._stream is not None:
                self._stream.write(text)
                self._stream.flush()
        except (OSError, ValueError):
            self._stream = None
        return len(text)

    def _columns(self) -> int:
        with suppress(OSError, ValueError, AttributeError):
            return max(20, os.get_terminal_size(self._stream.fileno()).columns)  # type: ignore[union-attr]
        return 80

    def _beat(self) -> None:
        while not self._stop.wait(_LOOK):
            self.tick()


HEART = Heartbeat(ACTIVITIES)
