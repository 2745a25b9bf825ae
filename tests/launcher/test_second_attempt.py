"""torchrun starts its workers again (--max-restarts) on the store of the attempt before: nothing of that one counts."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from megazero.base.errors import UserError
from megazero.launcher.environment import RankContext
from megazero.launcher.meeting import Presence, call_roll
from megazero.launcher.store import open_store
from megazero.launcher.world import World

SECONDS = timedelta(seconds=10)


def attempt(
    monkeypatch: pytest.MonkeyPatch, port: int, number: int, ranks: int, size: int, seconds: float, folder: Path
) -> list[object]:
    """What the roll call gives to each of the ranks that come to an attempt, whose processes have other ids."""
    values = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    values |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": str(number)}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    lock = threading.Lock()

    def one(rank: int) -> object:
        with lock:
            monkeypatch.setenv("RANK", str(rank))
            store = open_store(RankContext.of(World(rank, size, rank, "torchrun")), SECONDS)
        mine = Presence("host", "same", 1000 * (number + 1) + rank, 0)
        try:
            return call_roll(store, rank, size, seconds, mine)
        except UserError as error:
            return error

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, range(ranks)))


@pytest.fixture
def agents() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_the_roll_is_that_of_the_present_attempt(monkeypatch, agents: dist.TCPStore, tmp_path: Path):
    for number in (0, 1):
        for roll in attempt(monkeypatch, agents.port, number, 3, 3, 10, tmp_path):
            assert isinstance(roll, list)
            assert [there.pid for there in roll] == [1000 * (number + 1) + rank for rank in range(3)]


def test_a_rank_that_was_missing_may_come_to_the_next_attempt(monkeypatch, agents: dist.TCPStore, tmp_path: Path):
    assert all(isinstance(said, UserError) for said in attempt(monkeypatch, agents.port, 0, 2, 3, 0.5, tmp_path))
    said = attempt(monkeypatch, agents.port, 1, 3, 3, 10, tmp_path)
    assert all(isinstance(roll, list) for roll in said), [str(one) for one in said]
