"""Messages from one rank to one other: nothing waits to be sent, everything arrives once, under its own name."""

import time
from dataclasses import replace

import pytest
import torch

from megazero.comm.axes import P2P, Channel
from megazero.comm.collectives import all_reduce
from megazero.comm.grid import Axis, Grid
from megazero.comm.transport.p2p import PointToPoint
from megazero.comm.transport.shared_memory import P2P_SLOTS
from tests.comm.standins import NotedSlot
from tests.ranks import run_ranks

CPU = torch.device("cpu")
MANY = 5 * P2P_SLOTS


def axis_of(grid: Grid, sockets: bool) -> Axis:
    axis = grid["pipeline"]
    return replace(axis, comm=replace(axis.comm, shared_memory=None)) if sockets else axis


def value(channel: int, number: int, numel: int = 3000) -> torch.Tensor:
    return torch.full((numel // 3, 3), 1000.0 * channel + number)


def both_ways(grid: Grid, sockets: bool) -> int:
    """Each rank sends everything before it posts anything, on two channels a way; then takes one channel backwards."""
    axis = axis_of(grid, sockets)
    channels = [Channel(i, i % 2, 1 - i % 2, "test") for i in range(4)]
    messages = PointToPoint(axis, channels, CPU)
    for number in range(MANY):
        for channel in channels:
            if channel.source == axis.rank:
                messages.send(channel, value(channel.index, number))
    all_reduce(torch.ones(1 << 16), axis, "test")  # what is not yet taken does not hold up anything else
    mine = [channel for channel in channels if channel.target == axis.rank]
    receipts = [(c, n, messages.post(c, torch.empty(1000, 3), "x")) for n in range(MANY) for c in mine]
    right = sum(torch.equal(receipt.wait(), value(c.index, n)) for c, n, receipt in reversed(receipts))
    messages.finish()
    again = PointToPoint(axis, channels, CPU)  # the names of a run are never used twice
    for channel in channels:
        if channel.source == axis.rank:
            again.send(channel, value(channel.index, 77))
    right += sum(torch.equal(again.post(c, torch.empty(1000, 3), "x").wait(), value(c.index, 77)) for c in mine)
    again.finish()
    sent = axis.comm.ledger.traffic["pipeline"]["test"]
    assert sent.bytes_sent - 4 * (1 << 16) == 4 * 3000 * 2 * (MANY + 1)  # and the all-reduce
    return right


@pytest.mark.parametrize("sockets", [False, True], ids=["shared", "sockets"])
def test_everything_arrives_once_whatever_the_order(sockets: bool) -> None:
    assert run_ranks(2, both_ways, sockets, pipeline=2) == [2 * MANY + 2] * 2


def large(grid: Grid, dtype: torch.dtype) -> bool:
    """A message of several slots, and an empty one."""
    channel = Channel(0, 0, 1, "test")
    messages = PointToPoint(grid["pipeline"], [channel], CPU)
    big = torch.arange((5 << 20) + 3).to(dtype)
    for x in (big, big[:0]):
        if grid["pipeline"].rank == 0:
            messages.send(channel, x)
            messages.finish()
        else:
            assert torch.equal(messages.post(channel, torch.empty_like(x), "x").wait(), x)
    return True


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_long_messages_go_in_pieces(dtype: torch.dtype) -> None:
    assert run_ranks(2, large, dtype, pipeline=2) == [True, True]


def late(grid: Grid) -> list[tuple[str, list[int], str]]:
    """Rank 0 waits for a message of rank 1 that is sent a second later."""
    axis, noted, channel = grid["pipeline"], NotedSlot(), Channel(0, 1, 0, "test")
    messages = PointToPoint(replace(axis, comm=replace(axis.comm, status_slot=noted)), [channel], CPU)  # type: ignore[arg-type]
    if axis.rank == 1:
        time.sleep(1)
        messages.send(channel, torch.ones(3))
    else:
        messages.post(channel, torch.empty(3), "a message").wait()
    messages.finish()
    return noted.begun


def test_who_waits_notes_for_which_rank() -> None:
    assert run_ranks(2, late, pipeline=2)[0] == [(P2P, [1], "a message"), (P2P, [], "end")]


def around(grid: Grid) -> bool:
    """Every rank sends to the next while all wait for the one before, and their outboxes are full."""
    axis = grid["pipeline"]
    channels = [Channel(i, i, (i + 1) % axis.size, "test") for i in range(axis.size)]
    messages = PointToPoint(axis, channels, CPU)
    for number in range(MANY):
        messages.send(channels[axis.rank], value(axis.rank, number))
    source = (axis.rank - 1) % axis.size
    right = [
        torch.equal(messages.post(channels[source], torch.empty(1000, 3), "x").wait(), value(source, number))
        for number in range(MANY)
    ]
    messages.finish()  # who goes elsewhere before what was sent has found room would hold it back
    return all(right)


def test_nobody_waits_in_a_circle() -> None:
    assert run_ranks(4, around, pipeline=4) == [True] * 4


def test_a_strided_message_is_a_fault_of_ours() -> None:
    messages = PointToPoint(replace(Axis("pipeline"), size=2), [], CPU)
    with pytest.raises(AssertionError, match="strided view"):
        messages.send(Channel(0, 0, 1, "test"), torch.ones(4, 4).T)
