"""A rank whose GPU does not go on is noticed, the rank that all wait for is named, and the process ends.

No GPU: works and clocks stand in.
"""

import json
import os
import re
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from megazero.comm import collectives
from megazero.comm.axes import P2P
from megazero.comm.context import CommContext
from megazero.comm.device_queue import DeviceQueue
from megazero.comm.grid import Axis
from megazero.comm.readback import Mark
from megazero.comm.status_board import ON_DEVICE, STUCK, RankStatus, StatusBoard
from megazero.launcher import monitor
from megazero.launcher.diagnosis import stuck
from megazero.launcher.environment import RankContext
from megazero.launcher.monitor import Monitor, flight_recorder
from megazero.launcher.rendezvous import connect
from megazero.launcher.world import World
from tests.processes import until_gone
from tests.warm import Process


class StandIn:
    """A work of NCCL, as the host sees it: waiting for it proves nothing."""

    def __init__(self, *, completed: bool = False):
        self.completed = completed

    def is_completed(self) -> bool:
        return self.completed

    def wait(self) -> bool:
        return True


ALL, CPU = range(2), torch.device("cpu")


class Place:
    """A place in a stream (`readback.Mark`)."""

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed


def marking() -> tuple[DeviceQueue, list[Place]]:
    """Return a queue, and the places that it marks."""
    places: list[Place] = []

    def mark(device: torch.device, used: Mark | None) -> Place:
        if isinstance(used, Place):
            used.passed = False
            return used
        places.append(Place())
        return places[-1]

    return DeviceQueue(mark), places


def test_operations_end_in_their_order():
    queue, works = DeviceQueue(), [StandIn() for _ in range(5)]
    for work in works:
        queue.put("data", "data", ALL, work)
    other = queue.put("tensor", "tensor", ALL, StandIn())
    assert [one.axis for one in queue.unfinished()] == ["data", "tensor"]
    moves = queue.moves
    works[2].completed = True  # so those before have ended too
    assert queue.unfinished()[0].work is works[4] and queue.moves != moves
    works[4].completed = True
    assert queue.unfinished() == [other]
    other.work = None
    assert queue.unfinished() == [] and not any(queue._queues.values())


def test_a_work_that_a_stream_waits_for_is_let_go():
    """It holds its tensors; a mark behind the wait says as much."""
    queue, places = marking()
    work = StandIn()
    gone = weakref.ref(work)
    queued = queue.put("data", "data", ALL, work)
    queue.waited(queued, CPU)
    del work
    assert gone() is None, "a work holds its result"
    assert queue.unfinished() == [queued]
    places[0].passed = True
    assert queue.unfinished() == []


def test_of_the_marks_only_the_first_is_known_to_be_held_by_its_operation():
    """The stream waits for a tensor sum; a gather and a message that it waits for next may have ended long ago."""
    queue, places = marking()
    for communicator, axis in (("tensor", "tensor"), ("data", "data"), ("channel 0", P2P)):
        queue.waited(queue.put(communicator, axis, ALL, StandIn(completed=True), "activations"), CPU)
    coming = queue.put("channel 1", P2P, ALL, StandIn(), "gradients")
    newer = queue.put("tensor", "tensor", ALL, StandIn())
    assert [(one.axis, one.text) for one in queue.unfinished()] == [(P2P, "gradients"), ("tensor", "activations")]
    assert queue.unfinished()[-1].work is not newer.work, "the one that is waited for comes last, once for each line"
    places[0].passed = True
    assert queue.unfinished()[-1].axis == "data"
    for place in places:
        place.passed = True
    assert queue.unfinished() == [newer, coming]


def test_marks_are_used_again():
    """An event of CUDA costs the host more than a wait for it."""
    queue, places = marking()
    for _ in range(3):
        queue.waited(queue.put("data", "data", ALL, StandIn()), CPU)
        queue.waited(queue.put("data", "data", ALL, StandIn()), CPU)
        assert len(places) == 2 and len(queue.unfinished()) == 1
        for place in places:
            place.passed = True
        assert queue.unfinished() == []


def test_an_end_of_a_queue_without_an_onlooker_is_bounded():
    queue, _ = marking()
    for _ in range(10_000):
        queue.waited(queue.put("data", "data", ALL, StandIn()), CPU)
    assert len(queue._queues["data"]) < 5000


class Watched:
    """A monitor of a rank with a clock that is set by hand."""

    def __init__(self, launcher: str = "local"):
        self.now, self.ends, self.slept = 0.0, list[int](), list[float]()
        self.queue, self.board = DeviceQueue(), StatusBoard.private(2)
        slot = self.board.status_slot(0)
        slot.take("node7")
        self.place = RankContext(World(0, 2, 0, launcher), slot)
        self.monitor = Monitor(
            self.queue, self.place, 100.0, lambda: self.now, self.slept.append, lambda code: self.ends.append(code)
        )

    def put(self, work: StandIn, axis: str = "data") -> None:
        self.place.status_slot.begin(axis, ALL, "all_gather (gather, float32 [8])")
        self.queue.put(axis, axis, ALL, work)

    def looks(self, seconds: float) -> bool:
        """Whether the rank is found stuck while so much time passes."""
        end = self.now + seconds
        while self.now < end:
            self.now += 1.0
            if self.monitor.look():
                return True
        return False


def test_a_rank_that_computes_saves_or_waits_for_a_disk_is_not_stuck():
    watched = Watched()
    assert not watched.looks(500)
    watched.put(StandIn(completed=True))
    assert not watched.looks(500)


def test_a_slow_rank_whose_queue_moves_is_not_stuck():
    watched = Watched()
    for _ in range(10):
        watched.put(work := StandIn())
        assert not watched.looks(70)
        work.completed = True
    watched.put(old := StandIn(), "tensor")  # a receive that was posted early, while others go on
    for _ in range(10):
        watched.put(StandIn(completed=True))
        assert not watched.looks(70)
    assert not old.completed


def test_a_rank_is_stuck_after_8_tenths_of_the_timeout():
    watched = Watched()
    assert not watched.looks(300)
    watched.put(StandIn())
    assert not watched.looks(79)
    assert watched.looks(3)
    watched.put(StandIn())  # whose host goes on for a while
    assert not watched.looks(79) and watched.looks(3)


def test_the_end_of_a_stuck_rank(tmp_path: Path):
    watched = Watched()
    (log := tmp_path / "rank_00.log").touch()
    watched.place.stacks.into(log)
    watched.put(StandIn())
    assert watched.looks(100)
    watched.monitor.give_up(watched.monitor.look())
    assert watched.ends == [1] and watched.slept, "with the exit code of a failure, when the others have shown theirs"
    status = watched.board.read(0)
    assert (status.state, status.message) == (STUCK, ON_DEVICE) and status.on("data").open
    assert "nothing queued on the GPU has ended for 80 s" in log.read_text()
    assert "most recent call first" in log.read_text()
    watched.place.stacks.close()


def test_collectives_on_nccl_are_followed(monkeypatch: pytest.MonkeyPatch):
    work, (queue, places) = StandIn(), marking()
    monkeypatch.setattr(collectives.dist, "all_reduce", lambda *_, **__: work)
    axis = Axis("data", 2, 0, group=object(), comm=CommContext("nccl", device_queue=queue))  # type: ignore[arg-type]
    pending = collectives.start_all_reduce(torch.ones(3), axis, "loss")
    assert [one.work for one in queue.unfinished()] == [work]
    pending.wait()
    assert [one.axis for one in queue.unfinished()] == ["data"], "the host's wait is no end"
    assert queue.unfinished()[0].work is not work, "a work holds its result"
    places[0].passed = True
    assert queue.unfinished() == []


def test_a_monitor_ends_with_its_group(monkeypatch: pytest.MonkeyPatch):
    """Another group, made before the monitor has looked again, has one of its own."""
    groups = [World(0, 2, 0), World(1, 2, 1)]  # which can be referred to weakly
    there = groups[:1]
    monkeypatch.setattr(monitor.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(type(monitor.dist.group), "WORLD", property(lambda _: there[-1]))
    watched, before = Watched(), set(threading.enumerate())
    watched.monitor._sleep = lambda seconds: time.sleep(0.001)
    watched.monitor.start()
    (thread,) = set(threading.enumerate()) - before
    time.sleep(0.05)
    assert thread.is_alive()
    watched.put(StandIn())
    there.append(groups[1])
    thread.join(10)
    watched.now = 1000.0
    assert not thread.is_alive() and not watched.ends


def shown(queue: DeviceQueue) -> list[tuple[str, range, str]]:
    return [(one.axis, one.ranks, one.text) for one in queue.unfinished()]


def board_of(
    numbers: Sequence[dict[str, int]], lines: Callable[[int, str], range], stalled: Sequence[int]
) -> list[RankStatus]:
    """A board on which each rank has begun operations up to a number, and those `stalled` wait in all of them."""
    board = StatusBoard.private(len(numbers))
    for rank, counts in enumerate(numbers):
        slot = board.status_slot(rank)
        slot.take(f"node{rank}")
        slot.now(5, "backward")
        for axis, count in counts.items():
            for number in range(count):
                slot.begin(axis, lines(rank, axis), f"{axis} operation {number}")
                slot.end(axis)  # the host has waited
        if rank in stalled:
            queue = DeviceQueue()
            for axis in counts:
                queue.put(axis, axis, lines(rank, axis), StandIn())
            slot.stall(shown(queue))
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
    board = StatusBoard.private(3)
    slots = [board.status_slot(rank) for rank in range(3)]
    for rank, slot in enumerate(slots):
        slot.take(f"node{rank}")
    for rank in (1, 2):
        queue = DeviceQueue()
        queue.put("channel 0", P2P, range(rank - 1, rank), StandIn(), "activations")
        slots[rank].stall(shown(queue))
    error = str(stuck(board.read_all(), 2))
    assert error.startswith("MZ-311 rank=0: did not answer in p2p #1 activations in start on node0"), error


def test_many_ranks_are_examined_in_a_moment():
    size = 2048
    numbers = [{"world": 7, "data": 3} for _ in range(size)]
    numbers[77] = {"world": 6, "data": 3}
    line = lambda rank, axis: range(size) if axis == "world" else range(rank % 8, size, 8)  # noqa: E731
    statuses = board_of(numbers, line, [rank for rank in range(size) if rank != 77])
    began = time.process_time()
    assert str(stuck(statuses, 5)).startswith("MZ-311 rank=77 step=5: did not answer in world #7 ")
    assert time.process_time() - began < 2, "not the square of the ranks"


def entry(number: int, state: str) -> dict[str, object]:
    names = {"process_group": ["3", "tensor"], "profiling_name": "nccl:all_reduce", "input_sizes": [[8]]}
    return {**names, "collective_seq_id": number, "state": state}


def test_the_flight_recorder_is_shown_if_there_is_one():
    said = json.dumps({"entries": [entry(number, "completed") for number in range(30)] + [entry(30, "started")]})
    lines = flight_recorder(lambda *_: said.encode())
    assert len(lines) == 20 and lines[-1] == "tensor #30 nccl:all_reduce [[8]]: started"
    for broken in (b"", b"{}", b"[1]", b'{"entries": [1]}'):
        assert flight_recorder(lambda *_, broken=broken: broken) == []
    assert flight_recorder() == [], "nothing was queued here"


def be_stuck(place: RankContext) -> None:
    """Rank 0's GPU waits for rank 1, whose host is stopped before the operation."""
    os.write(1, f"pid {os.getpid()}\n".encode())
    connect(place, timeout=timedelta(seconds=60), fingerprint="same")
    place.status_slot.now(3, "forward")
    if place.world.rank:
        os.kill(os.getpid(), signal.SIGSTOP)
    queue = DeviceQueue()
    place.status_slot.begin("world", ALL, "all_reduce (loss, float32 [7])")
    queue.put("world", "world", ALL, StandIn())
    Monitor(queue, place, 1.0).start()
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
