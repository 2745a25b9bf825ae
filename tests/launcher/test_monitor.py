"""A rank whose GPU does not go on is noticed, the rank that all wait for is named, and the process ends.

No GPU: a flight recorder and clocks stand in.
"""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from megazero.comm.axes import P2P
from megazero.comm.status_board import ON_DEVICE, STUCK, RankStatus, StatusBoard
from megazero.launcher import monitor
from megazero.launcher.diagnosis import stuck
from megazero.launcher.environment import RankContext
from megazero.launcher.monitor import Monitor, Recorded, flight_recorder
from megazero.launcher.rendezvous import connect
from megazero.launcher.world import World
from tests.processes import until_gone
from tests.warm import Process

ALL = range(2)


class Watched:
    """A monitor of a rank with a clock and a flight recorder that are set by hand."""

    def __init__(self, launcher: str = "local"):
        self.now, self.ends, self.slept, self.first_uses = 0.0, list[int](), list[float](), list[str]()
        self.board, self.queued, self.number = StatusBoard(2), list[Recorded](), 0
        slot = self.board.status_slot(0)
        slot.take("node7")
        self.place = RankContext(World(0, 2, 0, launcher), slot)
        found = lambda unfinished: [one for one in self.queued if not (unfinished and one.ended)]  # noqa: E731
        monitor: Any = Monitor(self.place, 100.0, self.first_uses, found)
        self.monitor, monitor.clock = monitor, lambda: self.now
        monitor.sleep, monitor.end = self.slept.append, self.ends.append

    def put(self, group: str = "data") -> None:
        self.number += 1
        if group in ("data", "tensor"):
            self.place.status_slot.begin(group, ALL, "all_gather (gather, float32 [8])")
        self.queued.append(Recorded(self.number, group, "nccl:all_gather", False, f"#{self.number} [[8]]: scheduled"))

    def looks(self, seconds: float) -> bool:
        """Whether the rank is found stuck while so much time passes."""
        end = self.now + seconds
        while self.now < end:
            self.now += 1.0
            if self.monitor.is_stuck():
                return True
        return False


def test_a_rank_that_computes_saves_or_waits_for_a_disk_is_not_stuck():
    assert not Watched().looks(500)


def test_a_slow_rank_whose_queue_moves_is_not_stuck():
    watched = Watched()
    for _ in range(10):
        watched.put()
        assert not watched.looks(70)
        watched.queued.clear()
    watched.put("tensor")  # a receive that was posted early, while others go on
    for _ in range(10):
        watched.put()
        assert not watched.looks(70)
        del watched.queued[1:]
    assert len(watched.queued) == 1


def test_a_rank_is_stuck_after_8_tenths_of_the_timeout():
    watched = Watched()
    assert not watched.looks(300)
    watched.put()
    assert not watched.looks(79)
    assert watched.looks(3)
    watched.put()  # whose host goes on for a while
    assert not watched.looks(79) and watched.looks(3)


def test_what_a_later_operation_has_overtaken_is_not_unfinished():
    """The recorder never sees the end of a coalesced operation's parts, nor do other groups than ours count."""
    watched = Watched()
    for group in ("data", "data", "of the user"):
        watched.put(group)
    watched.queued[1] = watched.queued[1]._replace(ended=True)
    assert not watched.looks(500)
    watched.put()
    assert not watched.looks(79) and watched.looks(3)


def test_a_host_that_waits_in_the_first_use_of_a_communicator_is_stuck():
    """NCCL's flight recorder does not know of it yet."""
    watched = Watched()
    watched.first_uses.append("first all_reduce of tensor")
    assert not watched.looks(79) and watched.looks(3)


def test_the_end_of_a_stuck_rank(tmp_path: Path):
    watched = Watched()
    (log := tmp_path / "rank_00.log").touch()
    watched.place.stacks.into(log)
    for group in ("data", f"{P2P} 1", "data", "of the user"):
        watched.put(group)
    assert watched.looks(100)
    watched.monitor.give_up()
    assert watched.ends == [1] and watched.slept, "with the exit code of a failure, when the others have shown theirs"
    status = watched.board.read(0)
    assert (status.state, status.message) == (STUCK, ON_DEVICE) and status.on("data").open
    message = status.on(P2P)
    assert message.open and (message.ranks, message.text) == (range(1, 2), "nccl:all_gather")
    text = log.read_text()
    assert "no operation queued on the GPU has ended for 80 s" in text and "\ndata #3 [[8]]: scheduled\n" in text
    assert "most recent call first" in text
    watched.place.stacks.close()


def test_a_monitor_ends_with_its_group(monkeypatch: pytest.MonkeyPatch):
    """Another group, made before the monitor has looked again, has one of its own."""
    groups = [World(0, 2, 0), World(1, 2, 1)]  # which can be referred to weakly
    there = groups[:1]
    monkeypatch.setattr(monitor.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(type(monitor.dist.group), "WORLD", property(lambda _: there[-1]))
    watched, before = Watched(), set(threading.enumerate())
    watched.monitor.sleep = lambda seconds: time.sleep(0.001)
    watched.monitor.start()
    (thread,) = set(threading.enumerate()) - before
    time.sleep(0.05)
    assert thread.is_alive()
    watched.put()
    there.append(groups[1])
    thread.join(10)
    watched.now = 1000.0
    assert not thread.is_alive() and not watched.ends


def board_of(
    numbers: Sequence[dict[str, int]], lines: Callable[[int, str], range], stalled: Sequence[int]
) -> list[RankStatus]:
    """A board on which each rank has begun operations up to a number, and those `stalled` wait in all of them."""
    board = StatusBoard(len(numbers))
    for rank, counts in enumerate(numbers):
        slot = board.status_slot(rank)
        slot.take(f"node{rank}")
        slot.now(5, "backward")
        for axis, count in counts.items():
            for number in range(count):
                slot.begin(axis, lines(rank, axis), f"{axis} operation {number}")
                slot.end(axis)  # the host has waited
        if rank in stalled:
            slot.stall((axis, range(0), "") for axis in counts)
    return board.read_all()


def square(rank: int, axis: str) -> range:
    """Two tensor ranks, two data ranks."""
    return range(rank // 2 * 2, rank // 2 * 2 + 2) if axis == "tensor" else range(rank % 2, 4, 2)


@pytest.mark.parametrize("reporter", [0, 2, 3])
def test_the_rank_that_all_wait_for_is_named_by_all(reporter: int):
    """Rank 1 is held up. Rank 2 shares no axis with it; hosts have run ahead of their GPUs by different steps."""
    numbers = [{"tensor": 12, "data": 3}, {"tensor": 4, "data": 2}, {"tensor": 12, "data": 4}, {"tensor": 9, "data": 3}]
    error = str(stuck(board_of(numbers, square, [0, 2, 3]), reporter))
    assert re.match(r"MZ-311 rank=1 step=5: did not answer in .* in backward on node1 \(pid \d+\); rank", error), error


def test_where_all_are_stuck_the_one_that_is_behind_is_named():
    numbers = [{"tensor": 12}, {"tensor": 11}]
    error = str(stuck(board_of(numbers, lambda *_: range(2), [0, 1]), 0))
    assert error.startswith("MZ-311 rank=1 step=5: did not answer in tensor #12 tensor operation 11")
    even = str(stuck(board_of([{"tensor": 12}] * 2, lambda *_: range(2), [0, 1]), 0))
    assert even.startswith("MZ-314 rank=0 step=5: lost its connection in tensor #12"), even


def test_a_stage_that_waits_for_a_message_leads_to_its_sender():
    """Stage 2 waits for 1, which waits for 0; no lane says so while it works."""
    board = StatusBoard(3)
    slots = [board.status_slot(rank) for rank in range(3)]
    for rank, slot in enumerate(slots):
        slot.take(f"node{rank}")
    for rank in (1, 2):
        slots[rank].stall([(P2P, range(rank - 1, rank), "nccl:recv 1<-0")])
    error = str(stuck(board.read_all(), 2))
    assert error.startswith("MZ-311 rank=0: did not answer in p2p #1 nccl:recv 1<-0 in start on node0"), error


def test_many_ranks_are_examined_in_a_moment():
    size = 2048
    numbers = [{"world": 7, "data": 3} for _ in range(size)]
    numbers[77] = {"world": 6, "data": 3}
    line = lambda rank, axis: range(size) if axis == "world" else range(rank % 8, size, 8)  # noqa: E731
    statuses = board_of(numbers, line, [rank for rank in range(size) if rank != 77])
    began = time.process_time()
    assert str(stuck(statuses, 5)).startswith("MZ-311 rank=77 step=5: did not answer in world #7 ")
    assert time.process_time() - began < 2, "not the square of the ranks"


def dumped(*groups: str, state: str = "scheduled") -> bytes:
    """A dump of NCCL's flight recorder with an operation of each of these communicators."""
    names = {"profiling_name": "nccl:all_reduce", "input_sizes": [[8]], "state": state}
    entries = [
        {**names, "record_id": 7 + number, "process_group": ["3", group], "collective_seq_id": number}
        for number, group in enumerate(groups, 1)
    ]
    return json.dumps({"entries": entries}).encode()


def test_the_flight_recorder_is_read_if_there_is_one():
    asked = list[tuple[bool, bool]]()

    def dump(operations: bool, only_active: bool) -> bytes:
        asked.append((operations, only_active))
        return dumped("default_pg", "tensor")

    first, second = flight_recorder(True, dump)
    assert asked == [(True, True)] and first.group == "world", "torch has a name of its own for the first group"
    assert second == Recorded(9, "tensor", "nccl:all_reduce", False, "#2 nccl:all_reduce [[8]]: scheduled")
    for broken in (b"", b"{}", b"[1]", b'{"entries": [1]}'):
        assert flight_recorder(True, lambda *_, broken=broken: broken) == []
    assert flight_recorder(False) == [], "nothing was queued here"


def be_stuck(place: RankContext) -> None:
    """Rank 0's GPU waits for rank 1, whose host is stopped before the operation."""
    os.write(1, f"pid {os.getpid()}\n".encode())
    connect(place, timeout=timedelta(seconds=60), fingerprint="same")
    place.status_slot.now(3, "forward")
    if place.world.rank:
        os.kill(os.getpid(), signal.SIGSTOP)
    place.status_slot.begin("world", ALL, "all_reduce (loss, float32 [7])")
    place.status_slot.end("world")  # the host does not wait
    Monitor(place, 1.0, [], lambda unfinished: flight_recorder(unfinished, lambda *_: dumped("default_pg"))).start()
    signal.pause()  # the host waits for its GPU


def test_a_local_parent_names_the_rank_that_the_gpus_wait_for():
    program = (
        "import sys; from megazero.launcher.spawn import run_local; from tests.launcher.test_monitor import be_stuck"
    )
    program += "; sys.exit(run_local(2, be_stuck, lambda *_: None))"
    process = Process(["-c", program])
    pids = [int(process.stdout.readline().split()[1]) for _ in range(2)]
    _, err = process.communicate()
    until_gone(pids)
    line = r"MZ-311 rank=1 step=3: did not answer in world #\d all_reduce \(loss, float32 \[7\]\) in forward on \S+ .*"
    assert re.fullmatch(line + r"rank 0 waited; it is stopped \(SIGSTOP.*\n", err) and process.returncode == 1, err
