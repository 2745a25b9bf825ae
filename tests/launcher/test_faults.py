"""A rank that dies, hangs, or calls another operation: one line that names it, in time, and nobody is left behind.

Real processes, real signals. `faulty.py` has the cases.
"""

import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.processes import interrupt_twice, is_stopped, until, until_gone
from tests.warm import Process

pytestmark = pytest.mark.usefixtures("usual_signals")

TIMEOUT = 3  # seconds that ranks wait for each other


@dataclass
class Ended:
    """How a run of `faulty.py` ended."""

    code: int
    err: str
    pids: list[int]


def start(case: str, rank: int, size: int, timeout: float = TIMEOUT) -> Process:
    return Process(["-m", "tests.launcher.faulty", case, rank, timeout, size])


def pids_of(process: Process, size: int) -> list[int]:
    return [int(process.stdout.readline().split()[1]) for _ in range(size)]


def run(case: str, rank: int, size: int = 4, timeout: float = TIMEOUT) -> Ended:
    process = start(case, rank, size, timeout)
    pids = pids_of(process, size)
    _, err = process.communicate()
    until_gone(pids)
    return Ended(process.returncode, err, pids)


def test_nothing_wrong():
    ended = run("none", 0, timeout=60)
    assert (ended.code, ended.err) == (0, "")


HOST = r"on \S+ \(pid {pid}\)"
FORWARD = r"tensor #6 all_reduce \(block forward, float32 \[8\]\)"
CASES = {
    "kill": rf"MZ-310 rank={{rank}} step=3: was ended by SIGKILL in forward {HOST}, after tensor #5 all_gather .*",
    "segfault": rf"MZ-310 rank={{rank}} step=3: was ended by SIGSEGV in forward {HOST}, after tensor #5 all_gather .*",
    "stop": rf"MZ-311 rank={{rank}} step=3: did not answer in {FORWARD} in forward {HOST}; rank {{peer}} waited; .*",
    "spin": rf"MZ-311 rank={{rank}} step=3: did not answer in {FORWARD} in forward {HOST}; rank {{peer}} waited; .*",
    "shape": r"MZ-312 rank={odd} step=3: called tensor #6 all_reduce \(block forward, float32 \[{size}\]\) where .*",
    "dtype": r"MZ-312 rank={odd} step=3: called tensor #6 all_reduce \(block forward, float{bits} \[8\]\) where .*",
    "skip": r"MZ-312 rank={odd} step={skipping}: called tensor #6 .* where rank {even} called .*; all ranks .*",
    "extra": r"MZ-312 rank={odd} step=3: called tensor #6 .* where rank {even} called .*",
    "exit": rf"MZ-313 rank={{rank}} step=3: ended with exit code 3 in forward {HOST}, after tensor #5 .*",
    "user-error": r"MZ-205 rank={rank} step=3 data.bin: a bad token \(in forward on \S+\); use another file",
    "agree": r"MZ-205 rank={rank} step=3 data.bin: a bad token \(in forward on \S+\); use another file",
}


SLOW = ("stop", "dtype", "extra")  # wait for a timeout as others of their kind do


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.full), 3])
@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.full if c in SLOW else ()) for c in CASES])
def test_one_line_names_rank_and_operation(case: str, rank: int):
    ended = run(case, rank)
    peer = rank ^ 1
    odd, even = max(rank, peer), min(rank, peer)
    bad = odd == rank  # of two ranks that disagree the higher one is named, and what it called
    expected = CASES[case].format(
        rank=rank,
        pid=r"\d+",
        peer=peer,
        odd=odd,
        even=even,
        size=7 if bad else 8,
        bits=64 if bad else 32,
        skipping=4 if bad else 3,
    )
    assert re.fullmatch(expected + "\n", ended.err), ended.err
    assert len(ended.err) <= 301 and ended.code == 1


@pytest.mark.parametrize("case", ["error", "leave"])
def test_a_fault_of_our_own_shows_its_traceback_once(case: str):
    ended = run(case, 1)
    assert ended.code == 1 and ended.err.count("Traceback") == 1
    assert ended.err.splitlines()[-1].startswith("MZ-390 rank=1 step=3: a fault of megazero's own")


def test_the_chain_of_waiting_ends_at_the_rank_to_blame():
    """Some wait on the data axis for a rank that waits on the tensor axis for the one that stopped."""
    ended = run("stop", 1, size=8)
    assert re.match(rf"MZ-311 rank=1 step=3: did not answer in {FORWARD} ", ended.err), ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_are_passed_on(number: int):
    process = start("sleep", 1, 2, timeout=30)
    pids = pids_of(process, 2)
    assert process.stdout.readline() == "asleep\n"
    process.send_signal(number)
    _, err = process.communicate()
    assert process.returncode == 128 + number
    assert err == ("interrupted\n" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}\n")
    until_gone(pids)


def test_ranks_die_with_a_parent_that_is_killed():
    process = start("sleep", 1, 3 + 1, timeout=30)
    pids = pids_of(process, 4)
    os.kill(pids[2], signal.SIGSTOP)  # a stopped process too
    process.kill()
    process.communicate()
    until_gone(pids)


def test_second_interruption_does_not_wait():
    process = start("stop", 1, 2, timeout=30)  # the stopped rank cannot act on the first one
    pids = pids_of(process, 2)
    until(lambda: any(map(is_stopped, pids)))
    interrupt_twice(process)
    _, err = process.communicate()
    assert (process.returncode, err) == (130, "interrupted\n")
    until_gone(pids)


def test_no_port_is_open_beyond_the_loopback():
    """Neither the meeting nor the connections of local ranks can be reached from another machine."""
    process = start("sleep", 1, 2, timeout=30)
    pids = pids_of(process, 2)
    assert process.stdout.readline() == "asleep\n"
    found = {address for pid in (*pids, process.pid) for address in listening(pid)}
    process.kill()
    process.communicate()
    until_gone(pids)
    assert found == {"127.0.0.1"}


def listening(pid: int) -> set[str]:
    """IPv4 addresses that a process listens on; "::" for any IPv6 socket."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                raw = words[1].split(":")[0]
                found.add("::" if table == "tcp6" else ".".join(str(b) for b in reversed(bytes.fromhex(raw))))
    return found
