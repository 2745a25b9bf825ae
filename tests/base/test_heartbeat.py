"""The heartbeat names what takes long: on a terminal at once, in a log once in 30 seconds."""

import io
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from megazero.base.doing import Activities
from megazero.base.heartbeat import QUIET, Heartbeat
from tests.tiny_run import ROOT


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Beating:
    """A heartbeat, the clock that it goes by, and what it has written.

    Its thread may beat in between, which changes nothing: what is written depends on the clock alone.
    """

    def __init__(self, stream: io.StringIO) -> None:
        self.clock, self.stream = Clock(), stream
        self.activities = Activities(self.clock)
        self.heart = Heartbeat(self.activities)
        self.heart.begin(stream, "starting")

    def after(self, seconds: float, times: int = 1) -> str:
        for _ in range(times):
            self.clock.now += seconds
            self.heart.tick()
        return self.stream.getvalue()

    def screen(self) -> list[str]:
        """The lines that a terminal shows of what was written."""
        lines = (line.rpartition("\r\x1b[K")[2] for line in self.stream.getvalue().split("\n"))
        return [line for line in lines if line]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def beating() -> Iterator[Beating]:
    found = Beating(io.StringIO())
    yield found
    found.heart.end()


@pytest.fixture
def on_terminal() -> Iterator[Beating]:
    found = Beating(Terminal())
    yield found
    found.heart.end()


def test_in_a_log_a_phase_is_named_once_in_thirty_seconds(beating: Beating) -> None:
    with beating.activities.doing("validating", 40) as progress:
        assert beating.after(1.0, 29) == ""
        progress.advance(20)
        assert beating.after(1.0) == "validating 20/40  30 s\n"
        assert beating.after(1.0, 29) == "validating 20/40  30 s\n"
        assert beating.after(1.0).endswith("\nvalidating 20/40  60 s\n")


def test_in_a_log_shorter_phases_are_not_named(beating: Beating) -> None:
    """However long the whole of them is, and however short the silence: rows come in between, or do not."""
    for step in range(20):
        for phase in ("data", "forward", "backward", "update"):
            beating.activities.now("step", phase, step, 20)
            beating.after(7.0)
        if step > 10:
            with beating.heart.paused():
                beating.stream.write("row\n")
    with beating.activities.doing("saving"):
        beating.after(29.0)
    assert beating.stream.getvalue() == "row\n" * 9


def test_a_row_begins_the_silence_again(beating: Beating) -> None:
    with beating.activities.doing("training"):
        for _ in range(5):
            beating.after(20.0)
            with beating.heart.paused():
                beating.stream.write("row\n")
    assert beating.stream.getvalue() == "row\n" * 5


def test_the_inner_of_two_is_named(beating: Beating) -> None:
    with beating.activities.doing("building"):
        with beating.activities.doing("compiling"):
            beating.after(QUIET)
        assert beating.after(QUIET) == "compiling  30 s\nbuilding  60 s\n"


def test_a_terminal_has_one_line_below_the_rows(on_terminal: Beating) -> None:
    with on_terminal.activities.doing("compiling", 4) as progress:
        on_terminal.after(1.0)
        progress.advance()
        on_terminal.after(1.0)
        with on_terminal.heart.paused():
            on_terminal.stream.write("a row\n")
    on_terminal.heart.end()
    assert on_terminal.screen() == ["a row"]
    text = on_terminal.stream.getvalue()
    before, after = text.split("a row\n")
    assert before.index("compiling 0/4  1 s") < before.index("compiling 1/4  2 s") and "compiling 1/4  2 s" in after
    assert "───────── compiling 1/4" in before and before.count("\n") == 0, "a bar, on one line"


def test_a_short_command_has_no_line(on_terminal: Beating) -> None:
    with on_terminal.activities.doing("loading"), on_terminal.heart.paused():
        on_terminal.after(0.3)
        on_terminal.stream.write("an answer\n")
    assert on_terminal.after(0.3) == "an answer\n"


def test_what_a_handler_of_signals_says_comes_at_the_next_beat(beating: Beating) -> None:
    with beating.activities.doing("saving"):
        beating.heart.say("SIGTERM has come")
        assert beating.after(0.0) == "SIGTERM has come\n"


def test_who_does_not_read_is_not_written_to_again(beating: Beating) -> None:
    beating.stream.close()
    beating.clock.now += QUIET
    beating.heart.tick()
    beating.heart.tick()
    assert beating.heart._stream is None


def test_it_is_silent_before_and_after(beating: Beating) -> None:
    beating.heart.end()
    assert beating.after(QUIET) == ""
    silent = Heartbeat(Activities())
    silent.begin(None, "starting")
    assert silent._thread is None


def test_no_thread_lives_across_a_fork(beating: Beating) -> None:
    beating.heart.pause()
    assert not any(thread.name == "heartbeat" for thread in threading.enumerate())
    beating.heart.resume()
    assert beating.after(QUIET) == "starting  30 s\n"


HELD_BACK = """
import os, signal, sys
from megazero.base.heartbeat import HEART
HEART.begin(sys.stderr, "waiting")
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
os.kill(os.getpid(), signal.SIGTERM)
print(signal.sigtimedwait({signal.SIGTERM}, 20) is not None)
"""


def test_its_thread_takes_no_signal() -> None:
    """One that the main thread holds back waits for it, and does not end the process."""
    done = subprocess.run([sys.executable, "-c", HELD_BACK], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "True\n")


def test_on_a_real_terminal_the_words_fit_its_width() -> None:
    ours, theirs = pty.openpty()
    try:
        with open(theirs, "w", closefd=False) as stream:
            clock = Clock()
            heart = Heartbeat(Activities(clock))
            heart.begin(stream, "w" * 500)
            clock.now += 1
            heart.tick()
            heart.end()
            shown = ""
            while shown.count("\x1b[K") < 2:  # it comes in pieces, and the last one removes the line
                shown += os.read(ours, 4096).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    lines = re.findall("w+", shown)
    assert lines and all(20 < len(line) <= 80 for line in lines) and shown.count("\n") == 0
