"""Other processes, as tests look at them.

Waiting here has no limit of its own: a busy machine makes everything late, and pytest ends a test that hangs.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from itertools import cycle
from pathlib import Path
from typing import TypeVar

from megazero.launcher.signals import TWICE
from tests.warm import Process

T = TypeVar("T")


def until(condition: Callable[[], T]) -> T:
    """Wait until a condition holds, and return what it gave."""
    while not (found := condition()):
        time.sleep(0.01)
    return found


def alive(pid: int) -> bool:
    """Return whether a process is there and has not ended."""
    return _state(pid) not in ("", "Z", "X")


def is_stopped(pid: int) -> bool:
    """Return whether a process is there and was stopped by a signal."""
    return _state(pid) == "T"


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    """Return the numbers of the processes that a process has started, the oldest first."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def until_gone(pids: Iterable[int]) -> None:
    """Wait until none of these processes is left; the kernel may take a moment to end one whose parent died."""
    for pid in pids:
        until(lambda pid=pid: not alive(pid))


def interrupt_twice(process: Process) -> None:
    """Interrupt a process as somebody does who does not want to wait, until it has ended.

    A busy machine may deliver two interruptions so late that they count as one: then they come again, after a pause
    in which a process that is about to end has ended.
    """
    for pause in cycle((TWICE + 0.2, 20.0)):
        process.send_signal(signal.SIGINT)
        try:
            process.wait(pause)
        except subprocess.TimeoutExpired:
            continue
        return


def _state(pid: int) -> str:
    """Return the kernel's letter for the state of a process; "" where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
