"""A run that is told to end saves and says so by its exit code, whoever is told, and whatever it is doing."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from megazero.base.stop_signals import NOTED
from megazero.checkpoint.retention import verify
from megazero.checkpoint.store import Store
from megazero.comm.grid import single
from megazero.launcher.signals import Signals
from megazero.observe.jsonl import read_rows
from megazero.plan.traffic import TOTALS
from megazero.train.stopping import BY_SIGNAL, FAILED, FILE, REASONS, TIME, Reason, Stopping
from megazero.zero.engine import VOTES
from tests.processes import alive, children, cpu_seconds, interrupt_twice, until
from tests.run.test_session import training
from tests.tiny_run import TinyData, command
from tests.warm import Process

pytestmark = pytest.mark.usefixtures("usual_signals")

ENDLESS = ("run.steps=1000000", "data.valid=null", "schedule.decay=constant", "run.spike_factor=1e9")
TWO = ("parallel.tensor=2",)


def until_it_says(process: Process, text: str) -> None:
    for line in process.stdout:
        if line.startswith(text):
            return
    raise AssertionError(f"it ended before {text!r}: {process.stderr.read()}")


def check_saved(folder: Path, out: str, by: str) -> int:
    """The last line is true; returns the step, the only one that is there."""
    last = out.splitlines()[-1]
    (step, *_) = steps = Store(folder / "checkpoints").steps()
    assert last == (
        f"stopped by {by} after step {step} of 1000000, saved in {folder / 'checkpoints'}; "
        "go on with checkpoint.resume=auto" + (f" after you remove {folder / 'STOP'}" if "STOP" in by else "")
    )
    assert len(steps) == 1 and [row["step"] for row in read_rows(folder / "metrics.jsonl")] == list(range(1, step + 1))
    verify(Store(folder / "checkpoints").path(step))
    assert not (folder / "lock").exists()
    return step


COVER = {
    ("alone", signal.SIGINT),
    ("parent", signal.SIGTERM),
    ("rank", signal.SIGUSR1),
    ("parent", signal.SIGUSR2),
    ("parent", signal.SIGHUP),
}


@pytest.mark.parametrize(
    ("whom", "number"),
    [
        pytest.param(whom, number, marks=() if (whom, number) in COVER else pytest.mark.full)
        for whom in ("alone", "parent", "rank")
        for number in NOTED
    ],
)
def test_a_signal_saves_and_asks_to_be_started_again(
    tiny_data: TinyData, tmp_path: Path, number: signal.Signals, whom: str
) -> None:
    run = tmp_path / "run"
    with training(tiny_data, run, *ENDLESS, *(TWO if whom != "alone" else ())) as process:
        until_it_says(process, "step 3/")
        ranks = children(process.pid) if whom != "alone" else []
        os.kill(ranks[1] if whom == "rank" else process.pid, number)
        out, err = process.communicate()
        assert (process.returncode, err) == (75, "") and not any(alive(rank) for rank in ranks)
    assert check_saved(run, out, number.name) >= 3


def test_nohup_goes_on(tiny_data: TinyData, tmp_path: Path) -> None:
    """Where the end of the terminal was to be ignored from the start, it is."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with training(tiny_data, tmp_path / "run", "run.steps=30", *TWO) as process:
            until_it_says(process, "step 1/")
            os.kill(process.pid, signal.SIGHUP)
            out, err = process.communicate()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (process.returncode, err) == (0, "") and "step 30/30" in out


def test_going_on_after_a_signal_is_the_run_without_it(tiny_data: TinyData, tmp_path: Path) -> None:
    options = ("schedule.decay=constant", "data.valid=null", "model.dropout=0.1")
    with training(tiny_data, tmp_path / "run", *options, "run.steps=1000000") as process:
        until_it_says(process, "step 2/")
        process.send_signal(signal.SIGTERM)
        process.communicate()
    (step,) = Store(tmp_path / "run/checkpoints").steps()
    line = ("train.py", "--config", tiny_data.config, *options, f"run.steps={step + 2}")
    assert command(*line, f"run.dir={tmp_path / 'run'}", "checkpoint.resume=auto").returncode == 0
    assert command(*line, f"run.dir={tmp_path / 'whole'}").returncode == 0
    one, other = (Store(tmp_path / name / "checkpoints").path(step + 2) for name in ("run", "whole"))
    assert (one / "shard_00000.safetensors").read_bytes() == (other / "shard_00000.safetensors").read_bytes()


@pytest.mark.parametrize("phase", ["build", "first step", "validation", "saving"])
def test_a_signal_in_any_phase(tiny_data: TinyData, tmp_path: Path, phase: str) -> None:
    """In the middle of building there is nothing to save; a save is finished first, a validation broken off."""
    run = tmp_path / "run"
    often = ("checkpoint.every=1", "checkpoint.keep=1") if phase == "saving" else ()
    valid = ("data.valid=0.5", "data.valid_every=1") if phase == "validation" else ("data.valid=null",)
    with training(tiny_data, run, *ENDLESS[:1], *ENDLESS[2:], *TWO, *often, *valid) as process:
        if phase == "build":
            until((run / "lock").exists)
        elif phase == "first step":
            until_it_says(process, "small: ")
        elif phase == "validation":
            until_it_says(process, "step 1/")
            time.sleep(0.02)
        else:
            until_it_says(process, "step 2/")
            while not list((run / "checkpoints").glob(".step_*.tmp")):
                pass
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate()
    assert (process.returncode, err) == (75, "")
    if "nothing to save" in out:
        assert phase in ("build", "first step") and not Store(run / "checkpoints").steps()
    else:
        check_saved(run, out, "SIGTERM")


@pytest.mark.parametrize("ranks", [(), TWO], ids=["alone", "two"])
def test_a_second_interruption_leaves_at_once(tiny_data: TinyData, tmp_path: Path, ranks: tuple[str, ...]) -> None:
    """In the middle of something long, here a step of thousands of micro-batches."""
    run = tmp_path / "run"
    long = ("run.steps=1000000", "data.valid=null", "batch.global=8192", "batch.micro=1", "model.layers=8")
    with training(tiny_data, run, *long, *ranks) as process:
        until_it_says(process, "small: ")
        family = [process.pid, *children(process.pid)]
        begun = cpu_seconds(family[-1])
        until(lambda: cpu_seconds(family[-1]) > begun + 1.0)  # of a step that takes a minute
        interrupt_twice(process)
        _, err = process.communicate()
    assert (process.returncode, err) == ((130, "interrupted\n") if ranks else (-signal.SIGINT, ""))
    assert not any(alive(pid) for pid in family)
    for step in Store(run / "checkpoints").steps():
        verify(Store(run / "checkpoints").path(step))


def test_the_kill_switch(tiny_data: TinyData, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with training(tiny_data, run, *ENDLESS, *TWO) as process:
        until_it_says(process, "step 2/")
        (run / "STOP").touch()
        out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    step = check_saved(run, out, "the file STOP")
    line = ("train.py", "--config", tiny_data.config, f"run.dir={run}", *ENDLESS, "checkpoint.resume=auto")
    again = command(*line, *TWO)
    assert (again.returncode, again.stderr) == (0, "")
    assert again.stdout == f"nothing done: {run / 'STOP'} exists; remove it to train\n"
    assert Store(run / "checkpoints").steps() == [step]


def test_the_time_limit(tiny_data: TinyData, tmp_path: Path) -> None:
    line = ("train.py", "--config", tiny_data.config, f"run.dir={tmp_path / 'run'}", *ENDLESS, "run.time_limit=3")
    done = command(*line, *TWO)
    assert (done.returncode, done.stderr) == (75, "")
    check_saved(tmp_path / "run", done.stdout, "run.time_limit")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("saving", "at"), [(0.0, 70.0), (20.0, 40.0)])
def test_there_is_time_for_three_steps_and_a_save(tmp_path: Path, saving: float, at: float) -> None:
    """Steps of 10 seconds, a limit of 100."""
    clock = Clock()
    stopping = Stopping(single()["world"], torch.device("cpu"), Signals(), tmp_path / "STOP", 100.0, clock)
    for now in range(0, 100, 10):
        clock.now = float(now)
        votes = stopping.votes(failed=False, saving=saving)
        found = stopping.counted([float(place in votes) for place in range(len(REASONS))])
        assert found == (TIME if now >= at else None), now


def test_the_time_between_steps_of_an_evaluation_is_not_that_of_a_step(tmp_path: Path) -> None:
    clock = Clock()
    stopping = Stopping(single()["world"], torch.device("cpu"), Signals(), tmp_path / "STOP", 1000.0, clock)
    for now in (0.0, 10.0):
        clock.now = now
        stopping.votes(failed=False, saving=0.0)
    for now in (11.0, 300.0):  # inside an evaluation
        clock.now = now
        assert stopping.check() is None
    for now, reason in ((600.0, None), (610.0, None), (965.0, None), (975.0, TIME)):
        clock.now = now
        assert stopping.check() is reason, now


def test_a_lost_checkpoint_comes_first_then_signals(tmp_path: Path) -> None:
    clock, signals = Clock(), Signals()
    stopping = Stopping(single()["world"], torch.device("cpu"), signals, tmp_path / "STOP", 1.0, clock)

    def ends(failed: bool = False) -> Reason | None:
        votes = stopping.votes(failed=failed, saving=0.0)
        return stopping.counted([float(place in votes) for place in range(len(REASONS))])

    assert ends() is None
    (tmp_path / "STOP").touch()
    assert ends() == stopping.check() == FILE
    clock.now = 5.0
    assert ends() == TIME
    signals.first = signal.SIGUSR1
    assert ends() == stopping.check() == BY_SIGNAL[signal.SIGUSR1]
    assert ends(failed=True) == FAILED


def test_the_first_step_is_told_once_and_not_by_what_comes_before_it(tmp_path: Path) -> None:
    told: list[int] = []
    world = single()["world"]
    stopping = Stopping(
        world, torch.device("cpu"), Signals(), tmp_path / "STOP", None, first_step=lambda: told.append(1)
    )
    stopping.check()
    assert told == []
    for _ in range(3):
        stopping.counted([0.0] * VOTES)
    assert told == [1]


def test_there_is_a_vote_for_each_reason() -> None:
    assert len(REASONS) == VOTES and TOTALS == 3 + VOTES
