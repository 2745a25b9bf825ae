"""What the ranks of several hosts show each other: nothing while all is well, everything when one fails."""

import os
from datetime import timedelta

import pytest
import torch.distributed as dist

from megazero.comm.processes import host_id
from megazero.comm.status_board import FAILED, RUNNING, STUCK, StatusBoard, StatusSlot
from megazero.launcher import exit_status, rendezvous
from megazero.launcher.environment import RankContext
from megazero.launcher.exit_status import say_why
from megazero.launcher.job_board import JobBoard
from megazero.launcher.meeting import Presence
from megazero.launcher.stacks import Stacks
from megazero.launcher.world import World

TIMEOUT = timedelta(seconds=30)


def client(port: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, timeout=TIMEOUT, wait_for_workers=False)


class Job:
    """Ranks of two hosts, 0 and 1 on the first, 2 and 3 on the second, and the store."""

    def __init__(self) -> None:
        self.store: dist.TCPStore | None = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT
        )
        self.roll = [Presence(f"node{rank // 2}", "same", os.getpid(), host_id() + rank // 2) for rank in range(4)]
        stores = [client(self.store.port) for _ in range(4)]
        self.boards: list[JobBoard] = [JobBoard(stores[rank], rank, self.roll) for rank in range(4)]
        self.places = [RankContext(World(rank, 4, 0, "srun"), self.slot(rank)) for rank in range(4)]

    def slot(self, rank: int) -> StatusSlot:
        slot = StatusBoard().status_slot(0)
        slot.take(f"node{rank // 2}")
        slot.now(7, "forward")
        slot.begin("world", range(4), "all_reduce (loss, float32 [7])")
        slot.move(self.boards[rank], rank)
        return slot


@pytest.fixture
def job() -> Job:
    return Job()


def test_on_an_alarm_every_rank_publishes_where_it_is(job: Job):
    waiting = [job.boards[rank].listen(Stacks()) for rank in (1, 3)]
    assert [s.phase for s in job.boards[0].gather(0.0)] == ["forward", "", "", ""], "nothing is sent while all is well"
    job.boards[0].raise_alarm()
    for thread in waiting:
        thread.join(20)
    whole = job.boards[0].gather(0.1)
    assert [(status.step, status.host) for status in whole] == [(7, "node0")] * 2 + [(7, "node1")] * 2
    assert [status.phase for status in whole] == ["forward", "forward", "", "forward"], "rank 2 does not listen"
    assert whole[3].last is not None and whole[3].last.number == 1


def test_of_a_silent_rank_host_and_process_are_known(job: Job):
    silent = job.boards[0].gather(0.0)[1]
    assert (silent.state, silent.host, silent.pid, silent.step) == (RUNNING, "node0", os.getpid(), 7)
    assert silent.is_here and silent.pid == os.getpid() and not silent.is_stopped, "it is on this host"
    assert not job.boards[0].known().read(3).is_here, "it is on another"


def test_who_has_heard_that_another_says_why_is_silent(job: Job, capfd: pytest.CaptureFixture[str]):
    """The store ends with rank 0, which has said why it fails."""
    waiting = job.boards[2].listen(Stacks())
    job.places[0].status_slot.set_state(FAILED, "MZ-401: full")
    job.boards[0].raise_alarm()
    waiting.join(20)
    job.store = None
    job.places[2].status_slot.set_state(STUCK, "world")
    say_why(job.places[2])
    assert job.boards[2].has_heard and "MZ-" not in capfd.readouterr().err


def test_without_the_store_rank_0_is_known_to_have_ended(
    job: Job, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """The first rank of the host says what is known there."""
    monkeypatch.setattr(exit_status, "_GRACE", 0.1)
    job.store = None
    for rank in (2, 3):
        job.places[rank].status_slot.set_state(STUCK, "world")
    for rank in (2, 3):
        say_why(job.places[rank])
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("MZ-")]
    assert len(lines) == 1 and lines[0].startswith("MZ-311 rank=0 step=7: had ended and did not answer in world #1"), (
        lines
    )


def test_one_rank_says_why_for_all_hosts(job: Job, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Rank 3 has not begun what the others gave up in; it is on another host than the first that says so."""
    monkeypatch.setattr(exit_status, "_GRACE", 0.1)
    waiting = [job.boards[rank].listen(Stacks()) for rank in (1, 2, 3)]
    for rank in (0, 1, 2):
        job.places[rank].status_slot.begin("world", range(4), "all_gather (agree, int64 [1])")
    for rank in (0, 1):
        job.places[rank].status_slot.set_state(STUCK, "world")
    for rank in (0, 1):
        say_why(job.places[rank])
    for thread in waiting:
        thread.join(20)
    _, err = capfd.readouterr()
    start = "MZ-311 rank=3 step=7: did not answer in world #2 all_gather (agree, int64 [1]) in forward on node1 (pid "
    assert err.startswith(start) and err.count("\n") == 1, err


def test_the_same_error_is_said_once(job: Job, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(exit_status, "_GRACE", 0.1)
    for rank, text in ((3, "MZ-401: full"), (1, "MZ-401: full"), (2, "MZ-402: gone"), (0, "")):
        job.places[rank].status_slot.set_state(FAILED, text)
        say_why(job.places[rank])
    assert capfd.readouterr().err == "MZ-401: full\nMZ-402: gone\n"


def test_who_failed_through_nccl_does_not_wait_for_the_others(monkeypatch: pytest.MonkeyPatch):
    """Its clean-up may never end; the exit code stays."""
    ended: list[int] = []
    monkeypatch.setattr(rendezvous.os, "_exit", ended.append)
    monkeypatch.setattr(rendezvous.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(rendezvous.dist, "get_backend", lambda: "gloo")
    rendezvous.leave_at_once(7)
    assert ended == [], "gloo's clean-up waits for nobody"
    monkeypatch.setattr(rendezvous.dist, "get_backend", lambda: "nccl")
    rendezvous.leave_at_once(7)
    monkeypatch.setattr(rendezvous.dist, "is_initialized", lambda: False)
    rendezvous.leave_at_once(8)
    assert ended == [7]
