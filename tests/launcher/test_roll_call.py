"""The start asks little of the store: the same few requests of each rank, however many ranks there are."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store

from megazero.base.errors import FailedElsewhere, UserError
from megazero.comm.status_board import StatusBoard
from megazero.launcher.environment import INTERFACES, RankContext
from megazero.launcher.meeting import Presence, call_roll, packed, unpacked
from megazero.launcher.rendezvous import connect
from megazero.launcher.world import World
from scripts.bench.start import STAGES, rehearse

MOST = {"axes": 5}  # requests of a rank that is not rank 0; in other stages it asks again and again


def test_requests_per_rank_do_not_grow_with_the_ranks():
    before = set(threading.enumerate())
    found = rehearse(24, 0)
    for stage, most in MOST.items():
        at = STAGES.index(stage)
        assert max(one.requests[at] for one in found[1:-1]) <= most, stage
    at = STAGES.index("roll call")
    assert max(one.keys[at] - one.requests[at] for one in found[1:-1]) == 0, "one key a request"
    assert not set(threading.enumerate()) - before, "the ranks' threads have ended"


def presence(rank: int, fingerprint: str = "same") -> Presence:
    return Presence(f"host{rank // 2}", fingerprint, rank + 1, 0)


@pytest.fixture(params=["file", "tcp"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], Store]:
    """A client for each rank of a local parent's store, or of torchrun's."""
    if request.param == "file":
        return lambda rank: FileStore(str(tmp_path / "store"), 64)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    keep = [server]
    return lambda rank: PrefixStore("run", dist.TCPStore("127.0.0.1", keep[0].port, wait_for_workers=False))


def called(stores: Callable[[int], Store], ranks: range, size: int, seconds: float, odd: int = -1) -> list[object]:
    """What the roll call gives each of `ranks`: the roll, or the error."""

    def call(rank: int) -> object:
        store = stores(rank)
        store.set_timeout(timedelta(seconds=30))
        try:
            return call_roll(store, rank, size, seconds, presence(rank, "other" if rank == odd else "same"))
        except UserError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(call, ranks))


def test_all_ranks_hear_the_same_roll(stores: Callable[[int], Store]):
    for roll in called(stores, range(6), 6, 30):
        assert roll == [presence(rank) for rank in range(6)]


def test_missing_ranks_are_named_by_rank_0_alone(stores: Callable[[int], Store]):
    first, *others = called(stores, range(3), 5, 0.5)
    assert str(first).startswith("MZ-320 rank=0: 2 of 5 ranks did not connect within 0.5 s: 3, 4; see their output")
    assert all(isinstance(error, FailedElsewhere) and error.code == 320 for error in others)


def test_a_rank_0_that_does_not_come_is_named_once(stores: Callable[[int], Store]):
    errors = called(stores, range(1, 4), 4, 0.3)
    said = [str(error) for error in errors if not isinstance(error, FailedElsewhere)]
    assert len(said) == 1 and said[0].startswith("MZ-320 rank=0: rank 0 did not answer at the roll call; "), errors


def test_an_odd_rank_is_named_by_rank_0(stores: Callable[[int], Store]):
    errors = called(stores, range(4), 4, 30, odd=2)
    assert str(errors[0]).startswith("MZ-321 rank=2: runs other on host1, rank 0 same on host0; start all ranks from")
    assert all(isinstance(error, FailedElsewhere) for error in errors[1:])


def test_the_start_has_a_timeout_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in INTERFACES:
        monkeypatch.setenv(name, "lo")
    place = RankContext(World(0, 2, 0, "local"), StatusBoard().status_slot(0), tmp_path / "store")
    began = time.monotonic()
    with pytest.raises(UserError, match=r"MZ-320 rank=0: 1 of 2 ranks did not connect within 0\.5 s: 1;"):
        connect(place, timeout=timedelta(seconds=60), start_timeout=timedelta(seconds=0.5), fingerprint="same")
    assert time.monotonic() - began < 20


def test_the_roll_is_short():
    verdict = 0, [presence(rank) for rank in range(2048)]
    assert len(packed(verdict)) < 30_000 and unpacked(packed(verdict)) == verdict
