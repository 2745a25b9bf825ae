"""A signal in training is recorded, and told once: not by its handler, which may not write."""

import signal

import pytest

from megazero.launcher.signals import Signals, StoppedEarly

pytestmark = pytest.mark.usefixtures("usual_signals")


def test_only_the_first_signal_in_training_is_told() -> None:
    signals, told = Signals(), list[str]()
    signals.note()
    try:
        signals.only_note(told.append)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
    finally:
        signals.restore()
    assert told == ["SIGTERM received: the run saves and ends after the current step"]
    assert signals.first is signal.SIGTERM


def test_before_training_it_ends_the_run_once_what_is_held_is_done() -> None:
    signals, done = Signals(), list[str]()
    signals.note()
    try:
        with pytest.raises(StoppedEarly), signals.held():
            signal.raise_signal(signal.SIGTERM)
            done.append("held")
    finally:
        signals.restore()
    assert done == ["held"]
