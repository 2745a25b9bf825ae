"""A signal before the first step ends a run at once, whatever it is doing: one line, nobody left, and it is counted."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megazero.observe.jsonl import read_rows
from megazero.run.folder import RunFolder
from tests.processes import alive
from tests.quiet import without_heartbeat
from tests.tiny_run import ROOT, TinyData, command
from tests.warm import Process

SAID = "stopped by SIGTERM before the first step, nothing to save\n"
FULL = pytest.mark.full
# Nothing here ends by itself; it ends within a second where there is a processor, and a busy machine may take a few.
AT_ONCE = 10.0

# What runs instead of train.py: every rank says that it has come to a phase, and which process it is, and stays there,
# `where` in Python, in a call into a library that no handler of Python's interrupts, or in another process' lock.
DRIVER = """
import ctypes, fcntl, os, sys, time
from megazero.run import build as build_run
from megazero.run import parts
from megazero.run import session as run
from megazero.launcher import rendezvous
from megazero.__main__ import main

def here():
    with open({log!r}, "a") as log:
        log.write(f"{{os.getpid()}}\\n")

def stay(*arguments, **options):
    here()
    if {where!r} == "library":
        libc = ctypes.PyDLL(None)
        while True:
            libc.sleep(3600)
    while True:
        time.sleep(0.01)

{plant}
sys.exit(main(["train", *sys.argv[1:]]))
"""
PLANTS = {
    "rendezvous": "rendezvous.call_roll = stay",
    "folder": "run.find_start = stay",
    "building": "build_run.build = stay",
    "loading": "parts.load = stay",
}


@contextmanager
def started(line: list[object], **environment: str) -> Iterator[Process]:
    with Process(line, env=os.environ | environment) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(path: Path, lines: int, process: Process) -> list[int]:
    """The processes that say in a file that they have come to where they stay."""
    while not path.exists() or path.read_text().count("\n") < lines:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    return [int(word) for word in path.read_text().split()]


def end(process: Process, pid: int, ranks: list[int]) -> None:
    """A signal to one process ends all of them, with the right code and line."""
    began = time.monotonic()
    os.kill(pid, signal.SIGTERM)
    out, err = process.communicate()
    assert time.monotonic() - began < AT_ONCE
    assert (process.returncode, without_heartbeat(out), without_heartbeat(err)) == (75, SAID, "")
    assert not any(alive(rank) for rank in ranks)


@pytest.mark.parametrize(
    ("phase", "size", "whom", "where"),
    [
        ("building", 1, "parent", "python"),
        ("building", 2, "rank 1", "python"),
        ("folder", 2, "parent", "library"),
        ("rendezvous", 2, "rank 0", "python"),
        pytest.param("building", 2, "parent", "library", marks=FULL),
        pytest.param("building", 2, "rank 0", "python", marks=FULL),
        pytest.param("rendezvous", 2, "parent", "library", marks=FULL),
        pytest.param("loading", 1, "parent", "python", marks=FULL),
        pytest.param("loading", 2, "rank 1", "python", marks=FULL),
    ],
)
def test_a_signal_before_the_first_step(
    tiny_data: TinyData, tmp_path: Path, phase: str, size: int, whom: str, where: str
) -> None:
    folder, log = RunFolder(tmp_path / "run"), tmp_path / "here"
    driver = DRIVER.format(log=str(log), where=where, plant=PLANTS[phase])
    line = ["-c", driver, "--config", tiny_data.config, f"run.dir={folder.path}", f"parallel.tensor={size}"]
    with started([*line, "checkpoint.resume=auto", "data.valid=null"]) as process:
        ranks = wait_for(log, 1 if phase == "folder" else size, process)
        end(process, ranks[int(whom[-1])] if whom != "parent" else process.pid, ranks)
    assert not folder.lock.exists() and not list(folder.checkpoints.glob("step_*"))
    counted = folder.path / "early_stops"
    if phase == "rendezvous":
        assert not folder.path.exists(), "there is no folder yet to count in"
    else:
        assert counted.read_text() == "stopped by SIGTERM before the first step\n"


SLOW_PART = """
built, calls = parts.build_trainer, []
def slowly(*arguments, **options):
    calls.append(1)
    if len(calls) == 2:
        here()
        time.sleep(3)
    return built(*arguments, **options)
parts.build_trainer = slowly
"""


def test_a_signal_between_two_stages_is_not_before_the_first_step(tiny_data: TinyData, tmp_path: Path) -> None:
    """What is done is saved: the ranks are not ended where they build, and the start is not counted."""
    folder, log = RunFolder(tmp_path / "run"), tmp_path / "here"
    driver = DRIVER.format(log=str(log), where="python", plant=SLOW_PART)
    line = ["-c", driver, "--config", tiny_data.config, f"run.dir={folder.path}", "--nproc", "2", "batch.micro=1"]
    with started([*line, "data.valid=null", "stages=[{until_step: 1, batch: {global: 2}}]"]) as process:
        wait_for(log, 2, process)
        os.kill(process.pid, signal.SIGTERM)
        out, _ = process.communicate()
    assert process.returncode == 75 and "\nstopped by SIGTERM after step 1 of 4, saved in " in out, out
    assert not (folder.path / "early_stops").exists() and not folder.lock.exists()


IMPORTING = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            open({log!r}, "w").write("0\\n")
            sys.stdin.read()
sys.meta_path.insert(0, Finder())
from megazero.__main__ import main
sys.exit(main(["train", *sys.argv[1:]]))
"""


def test_a_signal_while_torch_is_imported(tiny_data: TinyData, tmp_path: Path) -> None:
    line = [sys.executable, "-c", IMPORTING.format(log=str(tmp_path / "here")), "--config", str(tiny_data.config)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(line, cwd=ROOT, text=True, **pipes) as process:
        wait_for(tmp_path / "here", 1, process)
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None and process.stderr is not None
        assert process.wait() == 75, "it does not wait for the import, which waits for us"
        assert (process.stdout.read(), process.stderr.read()) == (SAID, "")


# A compiler that says that it has begun, and goes on for some seconds.
SLOW = """#!/bin/sh
echo > {started}
exec sleep 20
"""


@pytest.mark.parametrize("size", [1, 2])
def test_a_signal_while_kernels_are_compiled(tiny_data: TinyData, tmp_path: Path, size: int) -> None:
    """Nobody waits for the compiler, whose result nobody takes; with two ranks one of them waits for the other's."""
    (tmp_path / "bin").mkdir()
    compiler, begun = tmp_path / "bin/g++", tmp_path / "begun"
    compiler.write_text(SLOW.format(started=begun))
    compiler.chmod(0o755)
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    run = ["train.py", "--config", tiny_data.config, f"run.dir={tmp_path / 'run'}", f"parallel.tensor={size}"]
    with started(run, **environment) as process:
        wait_for(begun, 1, process)
        end(process, process.pid, [])
    assert not list((tmp_path / "cache").glob("megazero/*.so"))


def test_three_in_a_row_are_too_many_here_too(tiny_data: TinyData, tmp_path: Path) -> None:
    folder, log = RunFolder(tmp_path / "run"), tmp_path / "here"
    driver = DRIVER.format(log=str(log), where="python", plant=PLANTS["building"])
    line = ["-c", driver, "--config", tiny_data.config, f"run.dir={folder.path}", "data.valid=null"]
    folder.path.mkdir()
    for _ in range(2):
        folder.early_stops.add("stopped by SIGTERM")
    with started([*line, "checkpoint.resume=auto"]) as process:
        wait_for(log, 1, process)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate()
    assert process.returncode == 1 and err.count("\n") == 1 and err.startswith("MZ-422")
    assert "stopped by SIGTERM before the first step, 3 times in a row: not started again" in err


# What runs instead of train.py: it gets a signal between two batches of its first validation.
IN_VALIDATION = """
import os, signal, sys
from megazero.train.validation import Validation
from megazero.__main__ import main

honest, asked = Validation.score, []

def score(self, done, stop):
    def signalled():
        asked.append(os.path.exists(sys.argv[-1].removeprefix("run.dir=") + "/checkpoints/step_00000002"))
        if len(asked) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return stop()
    return honest(self, done, signalled)

Validation.score = score
code = main(sys.argv[1:])
assert asked == [True] * 3, asked  # the step was saved before, and no batch was scored behind the signal
sys.exit(code)
"""


def test_a_signal_in_the_last_validation_breaks_it_off_and_the_next_job_does_it(
    tiny_data: TinyData, tmp_path: Path
) -> None:
    """The step is saved before it; who goes on from there owes the validation alone, and has the same row."""
    run = tmp_path / "run"
    line = ["train.py", "--config", tiny_data.config, "run.steps=2", "batch.micro=1"]
    done = command("-c", IN_VALIDATION, "train", *line[1:], f"run.dir={run}")
    assert (done.returncode, done.stderr) == (75, "")
    assert done.stdout.splitlines()[-1].startswith("stopped by SIGTERM after step 2 of 2, saved in ")
    again = command(*line, f"run.dir={run}", "checkpoint.resume=auto")
    assert (again.returncode, again.stderr) == (0, "") and "validation loss" in again.stdout
    assert command(*line, f"run.dir={tmp_path / 'whole'}").returncode == 0
    losses = [read_rows(tmp_path / name / "metrics.jsonl")[-1]["valid_loss"] for name in ("run", "whole")]
    assert losses[0] == losses[1]


# What runs instead of train.py, and gets a signal right behind its first lines, or behind its last one.
AT_AN_END = """
import atexit, os, runpy, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "megazero.__main__":
            os.kill(os.getpid(), signal.SIGTERM)
if {first}:
    sys.modules.pop("megazero.__main__", None)
    sys.meta_path.insert(0, Finder())
else:
    atexit.register(lambda: os.kill(os.getpid(), signal.SIGTERM))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_signal_to_the_first_lines_of_a_command(tiny_data: TinyData) -> None:
    done = command("-c", AT_AN_END.format(first=True), "train.py", "--config", tiny_data.config)
    assert (done.returncode, done.stdout, done.stderr) == (75, SAID, "")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=FULL)])
def test_a_signal_behind_the_last_line_of_a_run_changes_nothing(
    tiny_data: TinyData, tmp_path: Path, ranks: int
) -> None:
    line = ["--config", tiny_data.config, f"run.dir={tmp_path / 'run'}", "run.steps=2", f"parallel.tensor={ranks}"]
    done = command("-c", AT_AN_END.format(first=False), "train.py", *line)
    assert (done.returncode, done.stderr) == (0, "") and "stopped by" not in done.stdout
