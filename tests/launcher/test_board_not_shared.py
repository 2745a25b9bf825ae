"""What a rank publishes of a neighbour whose slot it does not see takes nothing from what that one says itself."""

import os
from datetime import timedelta

import pytest
import torch.distributed as dist

from megazero.comm import memfd
from megazero.comm.status_board import RUNNING, StatusBoard
from megazero.launcher.attendance import NOWHERE, Presence
from megazero.launcher.job_board import JobBoard, job_board

ROLL = {rank: Presence("node", "same", os.getpid(), 7, "host", NOWHERE) for rank in range(3)}


@pytest.fixture
def store() -> dist.Store:
    found = dist.HashStore()
    found.set_timeout(timedelta(seconds=5))
    return found


def test_an_empty_slot_says_nothing(store: dist.Store) -> None:
    """Rank 1 could not map the board of rank 0 (hidepid): it has one of its own."""
    boards = [JobBoard(StatusBoard.private(3), here, store, rank, ROLL) for rank, here in ((0, [0, 1]), (1, [1]))]
    for rank, board in enumerate(boards):
        slot = board.status_slot(rank)
        slot.take("node")
        slot.now(7, "forward")
    boards[1].raise_alarm()
    boards[0].raise_alarm()
    reader = JobBoard(StatusBoard.private(3), [2], store, 2, ROLL)
    statuses = reader.gather()
    assert [(status.state, status.step) for status in statuses[:2]] == [(RUNNING, 7)] * 2


def test_without_memfd_each_rank_has_a_board_of_its_own(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS."""
    monkeypatch.delattr(memfd.os, "memfd_create")
    assert job_board(store, 0, ROLL).size == 3
