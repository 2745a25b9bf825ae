"""What the ranks of several hosts show each other: nothing while all is well, everything when one fails."""

import os
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from megazero.comm import memfd
from megazero.comm.processes import Process
from megazero.comm.status_board import EMPTY, FAILED, RUNNING, STUCK, StatusBoard, StatusSlot
from megazero.launcher import exit_status, rendezvous
from megazero.launcher.environment import RankContext
from megazero.launcher.exit_status import say_why
from megazero.launcher.job_board import JobBoard, job_board
from megazero.launcher.meeting import Presence
from megazero.launcher.world import World

TIMEOUT = timedelta(seconds=30)


def client(port: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, timeout=TIMEOUT, wait_for_workers=False)


class Job:
    """Ranks of two hosts, 0 and 1 on the first, 2 and 3 on the second, and the store."""

    def __init__(self) -> None:
        own = Process.own()
        self.store: dist.TCPStore | None = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT
        )
        self.roll = [
            Presence(f"node{rank // 2}", "same", own.pid, own.started, f"host {rank // 2}") for rank in range(4)
        ]
        stores = [client(self.store.port) for _ in range(4)]
        self.boards: list[JobBoard] = [job_board(stores[rank], rank, self.roll) for rank in range(4)]
        self.places = [RankContext(World(rank, 4, 0, "srun"), self.slot(rank)) for rank in range(4)]

    def slot(self, rank: int) -> StatusSlot:
        slot = StatusBoard.private().status_slot(0)
        slot.take(f"node{rank // 2}")
        slot.now(7, "forward")
        slot.begin("world", range(4), "all_reduce (loss, float32 [7])")
        slot.move(self.boards[rank], rank)
        return slot


@pytest.fixture
def job() -> Job:
    return Job()


def test_the_ranks_of_a_host_share_memory_and_no_file(job: Job):
    for rank, status in enumerate(job.boards[0].read_all()):
        assert status.state == (RUNNING if rank < 2 else EMPTY)
    assert [status.step for status in job.boards[3].read_all()] == [0, 0, 7, 7]
    job.places[2].status_slot.now(8, "backward")
    assert job.boards[3].read(2).phase == "backward"


def test_on_an_alarm_every_rank_publishes_where_it_is(job: Job):
    waiting = job.boards[3].listen()
    assert [s.step for s in job.boards[0].gather()] == [7, 7, 0, 0], "nothing is sent while all is well"
    job.boards[0].raise_alarm()
    waiting.join(20)
    whole = job.boards[0].gather()
    assert [(status.step, status.host) for status in whole] == [(7, "node0")] * 2 + [(7, "node1")] * 2
    assert whole[2].last is not None and whole[2].last.number == 1, "by its neighbour, for it does not listen"


def test_of_a_silent_rank_host_and_process_are_known(job: Job):
    silent = job.boards[0].gather()[3]
    assert (silent.state, silent.host, silent.pid) == (RUNNING, "node1", os.getpid())


def test_without_the_store_rank_0_is_known_to_have_ended(
    job: Job, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """The first rank of each host says what is known there."""
    monkeypatch.setattr(exit_status, "_GRACE", 0.1)
    job.store = None
    for rank in (2, 3):
        job.places[rank].status_slot.set_state(STUCK, "world")
    for rank in (2, 3):
        say_why(job.places[rank])
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("MZ-")]
    assert len(lines) == 1 and lines[0].startswith("MZ-311 rank=0: had ended and did not answer in world #1"), lines


def test_one_rank_says_why_for_all_hosts(job: Job, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Rank 3 has not begun what the others gave up in; it is on another host than the first that says so."""
    monkeypatch.setattr(exit_status, "_GRACE", 0.1)
    monkeypatch.setattr(exit_status, "ask_for_stacks", lambda statuses: None)
    waiting = [job.boards[rank].listen() for rank in (2, 3)]
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


def test_an_empty_slot_says_nothing():
    """Rank 1 could not map the board of rank 0 (hidepid): it has one of its own."""
    store = dist.HashStore()
    roll = [Presence("node", "same", os.getpid(), 7, "host")] * 3
    boards = [JobBoard(StatusBoard.private(3), here, store, rank, roll) for rank, here in ((0, [0, 1]), (1, [1]))]
    for rank, board in enumerate(boards):
        slot = board.status_slot(rank)
        slot.take("node")
        slot.now(7, "forward")
    boards[1].raise_alarm()
    boards[0].raise_alarm()
    statuses = JobBoard(StatusBoard.private(3), [2], store, 2, roll).gather()
    assert [(status.state, status.step) for status in statuses[:2]] == [(RUNNING, 7)] * 2


def test_without_memfd_each_rank_has_a_board_of_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(memfd.os, "memfd_create")
    roll = [Presence("node", "same", os.getpid(), 7, "host")] * 3
    assert job_board(dist.HashStore(), 0, roll).size == 3


def test_who_failed_through_nccl_does_not_wait_for_the_others(monkeypatch: pytest.MonkeyPatch):
    """Its clean-up may never end; the exit code stays."""
    ended: list[int] = []
    monkeypatch.setattr(rendezvous.os, "_exit", ended.append)
    monkeypatch.setattr(rendezvous, "_ABORT", 0.1)
    monkeypatch.setattr(rendezvous, "_abort_process_group", lambda: time.sleep(1.0))
    monkeypatch.setattr(rendezvous.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(rendezvous.dist, "get_backend", lambda: "gloo")
    rendezvous.leave_at_once(7)
    assert ended == [], "gloo's clean-up waits for nobody"
    monkeypatch.setattr(rendezvous.dist, "get_backend", lambda: "nccl")
    began = time.monotonic()
    rendezvous.leave_at_once(7)
    assert ended == [7] and time.monotonic() - began < 0.9
    monkeypatch.setattr(rendezvous.dist, "is_initialized", lambda: False)
    rendezvous.leave_at_once(8)
    assert ended == [7]
