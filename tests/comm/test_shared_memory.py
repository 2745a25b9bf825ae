"""Shared memory between ranks of one host: the same results as through sockets, whatever is under way."""

import random
from dataclasses import replace
from datetime import timedelta

import pytest
import torch

from megazero.comm.collectives import start_all_gather, start_all_reduce, start_reduce_scatter
from megazero.comm.grid import Axis, Grid
from megazero.comm.transport import shared_memory as shared
from megazero.comm.transport.exchange import CollectiveError
from megazero.comm.transport.shared_memory import Label, SharedMemoryTransport
from tests.comm.test_collectives import reduce_everything, scatter_and_gather
from tests.ranks import run_ranks


def through_sockets(axis: Axis) -> Axis:
    return replace(axis, comm=replace(axis.comm, shared_memory=None))


def both_ways(grid: Grid) -> bool:
    sockets = grid.with_comm(replace(grid.comm, shared_memory=None))
    assert grid.comm.shared_memory is not None and grid.comm.shared_memory.reached == frozenset(
        range(grid["world"].size)
    )
    pairs = zip(reduce_everything(grid), reduce_everything(sockets), strict=True)
    same = all(torch.equal(a, b) for a, b in pairs)
    pairs = zip(scatter_and_gather(grid, 700), scatter_and_gather(sockets, 700), strict=True)
    return same and all(torch.equal(a, b) for a, b in pairs)


def another_operation(grid: Grid) -> str:
    x = torch.ones(8)
    if grid["world"].rank == 0:
        pending = start_all_gather(x, grid["world"], "test")
    else:
        pending = start_all_reduce(x, grid["world"], "test")
    with pytest.raises(CollectiveError) as caught:
        pending.wait()
    return f"{caught.value}, {caught.value.rank}"


def test_another_operation_of_a_rank_is_told_at_once():
    """Long before the time is up: 60 s here."""
    assert run_ranks(2, another_operation, fresh=True) == [
        "world axis: rank 1 has called another operation, 1",
        "world axis: rank 0 has called another operation, 0",
    ]


def test_an_empty_label_contradicts_none():
    first, other = Label(0, 5), Label(0, 6)
    assert not first.contradicts(0) and not first.contradicts(first.key) and first.contradicts(other.key)
    assert not Label(1, 5).contradicts(first.key) and not Label(64, 5).contradicts(other.key)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_shared_memory_gives_what_sockets_give(size: int):
    assert all(run_ranks(size, both_ways))


def stress(grid: Grid, seed: int) -> int:
    """Random operations on two axes, up to five under way, waited for in random order; each result is checked."""
    choose, checked, pending = random.Random(seed), 0, []
    for number in range(200):
        axis = choose.choice([grid["tensor"], grid["data"]])
        rows = axis.size * choose.choice([1, 3, 4000])
        ranks = torch.tensor([float(rank) for rank in axis.ranks])
        kind = choose.choice(["reduce", "scatter", "gather"])
        mine = torch.full((rows, 3), grid["world"].rank + number * 100.0)
        if kind == "reduce":
            expected = torch.full((rows, 3), float((ranks + number * 100).sum()))
            pending.append((start_all_reduce(mine, axis, "test"), expected))
        elif kind == "scatter":
            expected = torch.full((rows // axis.size, 3), float((ranks + number * 100).sum()))
            pending.append((start_reduce_scatter(mine, axis, "test"), expected))
        else:
            expected = (ranks + number * 100).repeat_interleave(rows)[:, None].expand(-1, 3)
            pending.append((start_all_gather(mine, axis, "test"), expected))
        while len(pending) > choose.choice([0, 2, 4]):
            operation, expected = pending.pop(choose.randrange(len(pending)))
            assert torch.equal(operation.wait(), expected), number
            checked += 1
    return checked


@pytest.mark.parametrize("seed", range(3))
def test_operations_on_two_axes_under_way_together(seed: int):
    assert all(count >= 195 for count in run_ranks(4, stress, seed, tensor=2))


def many_under_way(grid: Grid, count: int) -> list[float]:
    """More operations than there are slots or labels, waited for in reverse, with others on another axis between."""
    pending = [start_all_reduce(torch.full((1000,), float(i)), grid["data"], "test") for i in range(count)]
    between = [float(start_all_reduce(torch.ones(1), grid["tensor"], "test").wait()) for _ in range(50)]
    assert between == [2.0] * 50
    return [float(operation.wait()[0]) for operation in reversed(pending)]


@pytest.mark.parametrize("count", [9, 100])
def test_any_number_of_operations_may_be_under_way(count: int):
    expected = [2.0 * i for i in reversed(range(count))]
    assert run_ranks(4, many_under_way, count, tensor=2) == [expected] * 4


def one_long_under_way(grid: Grid) -> list[float]:
    first = start_all_reduce(torch.ones(3), grid["data"], "test")
    rest = [float(start_all_reduce(torch.ones(3), grid["data"], "test").wait()[0]) for _ in range(shared.LABELS * 2)]
    assert rest == [2.0] * len(rest)
    return first.wait().tolist()


def test_one_operation_may_be_under_way_for_long():
    assert run_ranks(2, one_long_under_way) == [[2.0] * 3] * 2


def test_where_boxes_cannot_be_opened_sockets_are_used(monkeypatch: pytest.MonkeyPatch):
    """On one rank only: the others must know."""
    opened = SharedMemoryTransport.open

    def forbidden(self: SharedMemoryTransport, rank: int, pid: int, descriptor: int) -> None:
        if self.rank == 1:
            raise PermissionError("no")
        opened(self, rank, pid, descriptor)

    monkeypatch.setattr(shared.SharedMemoryTransport, "open", forbidden)
    reached = run_ranks(3, lambda grid: (grid.comm.shared_memory.reached, reduce_everything(grid)[0].shape))
    assert [ranks for ranks, _ in reached] == [frozenset({0}), frozenset({1}), frozenset({2})]


def silent_peer(grid: Grid) -> str:
    shared_memory = grid.comm.shared_memory
    assert shared_memory is not None
    if grid["world"].rank == 0:
        return "silent"
    with pytest.raises(TimeoutError, match="no answer within"):
        SharedMemoryTransport.wait_for(_impatient(shared_memory), 0, "world", Label(1, 2))
    for number in range(shared.SLOTS):
        shared_memory.post("world", Label(number, 2), [torch.ones(2)], 8, [0])
    with pytest.raises(TimeoutError, match="no answer within"):
        shared_memory.post("world", Label(99, 2), [torch.ones(2)], 8, [0])
    return "noticed"


def _impatient(shared_memory: SharedMemoryTransport) -> SharedMemoryTransport:
    shared_memory._timeout = timedelta(seconds=0.5).total_seconds()
    return shared_memory


def test_a_peer_that_neither_writes_nor_reads_is_noticed():
    assert run_ranks(2, silent_peer, fresh=True) == ["silent", "noticed"]  # its outbox stays full
