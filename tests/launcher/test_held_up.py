"""A rank that is stopped before the first step is named, with its process, host and phase, whichever it is."""

import os
import re
from pathlib import Path

import pytest

from tests.launcher.test_faults import TIMEOUT, pids_of
from tests.launcher.test_rendezvous import STEP, free_port
from tests.processes import is_stopped, until, until_gone
from tests.warm import Process


def start(case: str, rank: int, *more: object, **environment: str) -> Process:
    line = ["-m", "tests.launcher.held_up", case, rank, TIMEOUT, 2, *more]
    return Process(line, env=os.environ | environment, stdin=True)


def start_step(case: str, rank: int, *more: object) -> tuple[list[Process], list[int]]:
    """Start two tasks as srun does, rank 0 first, and let them meet when both are there; with their process ids."""
    step = STEP | {"MASTER_PORT": free_port()}
    tasks = [start(case, rank, *more, **step, SLURM_PROCID=str(k), SLURM_LOCALID=str(k)) for k in (0, 1)]
    pids = [pids_of(task, 1)[0] for task in tasks]
    for task in tasks:
        task.stdin.write("\n")
        task.stdin.flush()
    return tasks, pids


PHASES = {"start": "start", "memory": "start", "group": "start", "axes": "start", "build": "build", "inside": "build"}
QUICK = [("start", 1), ("axes", 0), ("build", 0), ("inside", 1)]
REST = [(case, rank) for case in PHASES for rank in (0, 1) if (case, rank) not in QUICK]


@pytest.mark.parametrize(
    "cases",
    [QUICK, pytest.param(REST, marks=pytest.mark.full)],
    ids=["some", "rest"],
)
def test_a_local_rank_that_is_stopped_is_named(tmp_path: Path, cases: list[tuple[str, int]]):
    """One job after the other is started, and all wait at the same time. Who is stopped has no stacks to show."""
    jobs = []
    for case, rank in cases:
        folder = tmp_path / f"{case}-{rank}"
        folder.mkdir()
        process = start(case, rank, folder)
        pids = pids_of(process, 2)
        until(lambda process=process, pids=pids: any(map(is_stopped, pids)) or process.poll() is not None)
        jobs.append((case, rank, folder, process, pids))
    for case, rank, folder, process, pids in jobs:
        _, err = process.communicate()
        until_gone(pids)
        if case == "start":  # it has not come to the roll call
            missing = (
                "1 of 2 ranks did not connect within 3 s: 1 " if rank else "rank 0 did not answer at the roll call; "
            )
            assert err.startswith(f"MZ-320 rank=0: {missing}") and err.count("\n") == 1 == process.returncode, err
            continue
        where = rf"MZ-311 rank={rank}: did not .* in {PHASES[case]} on \S+ \(pid (\d+)\).* waited .*\n"
        named = re.fullmatch(where, err)
        named = named or re.fullmatch(rf"MZ-311 rank={rank}: did not .*on \S+ \(pid (\d+)\).* waited.*\n", err)
        assert named is not None and int(named[1]) in pids and f" in {PHASES[case]} " in err, (case, rank, err)
        assert "it is stopped (SIGSTOP" in err and process.returncode == 1, (case, rank, err)
        if case == "build":
            assert (folder / f"rank_{rank:02d}.log").read_text() == ""
            assert "in agree" in (folder / f"rank_{1 - rank:02d}.log").read_text()


@pytest.mark.parametrize(
    "cases",
    [[("memory", 0), ("axes", 1)], pytest.param([("group", 0), ("group", 1)], marks=pytest.mark.full)],
    ids=["most", "rest"],
)
def test_a_task_of_srun_that_is_stopped_is_named(cases: list[tuple[str, int]]):
    """By the others, which have no parent to look; rank 0 takes the store with it."""
    steps = []
    for case, rank in cases:
        tasks, pids = start_step(case, rank)
        until(lambda rank=rank, pids=pids, tasks=tasks: is_stopped(pids[rank]) or tasks[rank].poll() is not None)
        steps.append((rank, tasks, pids))
    try:
        for rank, tasks, pids in steps:
            _, err = tasks[1 - rank].communicate()
            line = rf"MZ-311 rank={rank}: did not answer in world #\d .* on \S+ \(pid {pids[rank]}\); "
            line += r"ranks? .* waited; it is stopped \(SIGSTOP"
            if rank == 0:  # it may be stopped before the other has read who it is
                line += "|MZ-320 rank=0: rank 0 did not answer at the roll call; rank 1 waited; "
            assert re.search(line, err), err
            assert tasks[1 - rank].returncode == 1 and err.count("MZ-") == 1 and "Traceback" not in err
    finally:
        for rank, tasks, _ in steps:
            tasks[rank].kill()
            tasks[rank].communicate()


@pytest.mark.parametrize(
    ("case", "where"), [pytest.param("spin", "in spin", marks=pytest.mark.full), ("lock", "in hold_the_lock")]
)
def test_on_a_hang_every_live_rank_writes_its_stacks(tmp_path: Path, case: str, where: str):
    """Also one that holds the interpreter's lock; the one that gave up says where."""
    process = start(case, 1, tmp_path)
    pids = pids_of(process, 2)
    _, err = process.communicate()
    until_gone(pids)
    assert err.startswith("MZ-311 rank=1: did not answer in world #"), err
    assert where in (tmp_path / "rank_01.log").read_text()
    gave_up = (tmp_path / "rank_00.log").read_text()
    assert "gave up here:" in gave_up and "in agree" in gave_up and "most recent call first" in gave_up


def test_tasks_of_srun_ask_each_other_for_their_stacks(tmp_path: Path):
    """The one that gave up raises an alarm, on which those that go on write theirs."""
    tasks, _ = start_step("spin", 1, tmp_path)
    try:
        _, err = tasks[0].communicate()
        assert err.startswith("MZ-311 rank=1: did not answer in world #"), err
        assert "in spin" in (tmp_path / "rank_01.log").read_text()
    finally:
        for task in tasks:
            task.kill()
            task.communicate()
