"""The heartbeat says what takes long, on lines that stay readable, and says nothing of what does not."""

import io
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from megazero.base.doing import Activities
from megazero.base.heartbeat import FIRST, SECOND, Heartbeat
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


def test_what_is_quick_is_not_spoken_of(beating: Beating) -> None:
    for _ in range(10):
        with beating.activities.doing("something quick"):
            beating.after(FIRST / 2)
        with beating.heart.paused():
            pass
    assert beating.stream.getvalue() == ""


def test_words_then_a_dot_a_second_then_how_long_it_took(beating: Beating) -> None:
    with beating.activities.doing("compiling"):
        assert beating.after(FIRST + 0.01) == "compiling"
        assert beating.after(SECOND / 2) == "compiling"
        assert beating.after(SECOND, 3) == "compiling..."
    with beating.heart.paused():
        beating.stream.write("a row\n")
    assert beating.stream.getvalue() == "compiling... 4 s\na row\n"


def test_the_words_come_within_the_first_second(beating: Beating) -> None:
    assert FIRST < 1 and SECOND < 2
    assert beating.after(FIRST + 0.01) == "starting"


def test_the_inner_of_two_is_what_is_said(beating: Beating) -> None:
    with beating.activities.doing("building"):
        with beating.activities.doing("compiling"):
            beating.after(1.0)
        assert beating.after(1.0) == "compiling 2 s\nbuilding"


def test_progress_now_and_then_and_at_the_end(beating: Beating) -> None:
    with beating.activities.doing("validating", 40) as progress:
        beating.after(1.0)
        progress.advance(20)
        beating.after(1.0, 11)
        progress.advance(20)
    with beating.heart.paused():
        pass
    assert beating.stream.getvalue() == "validating.......... 20/40. 40/40 12 s\n"


def test_phases_of_a_step_share_a_line(beating: Beating) -> None:
    beating.activities.now("step 3/9", "forward")
    beating.after(1.0, 2)
    beating.activities.now("step 3/9", "backward")
    beating.after(1.0, 2)
    beating.activities.now("step 4/9", "data")
    assert beating.after(1.0) == "step 3/9 forward. backward., step 4/9 data"
    with beating.heart.paused():
        pass
    assert beating.stream.getvalue().endswith("data 5 s\n")


def test_a_line_of_steps_says_how_long_since_its_first_began(beating: Beating) -> None:
    for step in range(3):
        beating.activities.now(f"step {step}/9", "forward")
        beating.after(1.0)
    with beating.activities.doing("validating"):
        beating.after(1.0)
    assert beating.stream.getvalue() == "step 0/9 forward, step 1/9 forward, step 2/9 forward 4 s\nvalidating"


def test_a_line_of_dots_is_ended_before_it_is_too_long(beating: Beating) -> None:
    with beating.activities.doing("training"):
        lines = beating.after(1.0, 300).splitlines()
    assert len(lines) > 1 and max(map(len, lines)) < 120 and all(line.startswith("training") for line in lines)


def test_a_terminal_has_one_line_that_is_cleared(on_terminal: Beating) -> None:
    with on_terminal.activities.doing("compiling", 3) as progress:
        on_terminal.after(1.0)
        progress.advance()
        on_terminal.after(1.0)
    with on_terminal.heart.paused():
        on_terminal.stream.write("a row\n")
    assert on_terminal.stream.getvalue() == ("\r\x1b[2Kcompiling 0/3  1 s\r\x1b[2Kcompiling 1/3  2 s\r\x1b[2Ka row\n")


def test_a_line_that_somebody_else_redraws_takes_the_words(on_terminal: Beating) -> None:
    shown: list[str] = []
    on_terminal.heart.show_on(shown.append)
    with on_terminal.activities.doing("saving"):
        on_terminal.after(1.0)
    on_terminal.heart.show_on(None)
    assert shown == ["saving  1 s"] and on_terminal.stream.getvalue() == ""


def test_what_a_handler_of_signals_says_comes_at_the_next_beat(beating: Beating) -> None:
    with beating.activities.doing("saving"):
        beating.after(1.0)
        beating.heart.say("SIGTERM has come")
        assert beating.after(0.0) == "saving 1 s\nSIGTERM has come\n"


def test_who_does_not_read_is_not_written_to_again(beating: Beating) -> None:
    beating.stream.close()
    beating.clock.now += 5
    beating.heart.tick()
    beating.heart.tick()
    assert beating.heart._stream is None


def test_it_is_silent_before_and_after(beating: Beating) -> None:
    beating.heart.end()
    assert beating.after(10.0) == ""
    silent = Heartbeat(Activities())
    silent.begin(None, "starting")
    assert silent._thread is None


def test_no_thread_lives_across_a_fork(beating: Beating) -> None:
    beating.heart.pause()
    assert not any(thread.name == "heartbeat" for thread in threading.enumerate())
    beating.heart.resume()
    assert beating.after(1.0) == "starting"


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
            shown = os.read(ours, 4096).decode()
            heart.end()
            cleared = os.read(ours, 4096).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert shown.startswith("\r\x1b[2Kwww") and len(shown) < 100 and cleared == "\r\x1b[2K"
