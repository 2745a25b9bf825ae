"""On NCCL every communicator is connected before the first step, in an order in which nobody waits in a circle."""

from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megazero.comm import nccl
from megazero.comm.axes import FEW_CTAS, Channel
from megazero.comm.context import CommContext
from megazero.comm.grid import Grid, lay_out, make_grid
from megazero.comm.status_board import StatusBoard
from megazero.comm.transport.p2p import PointToPoint
from megazero.pipeline.transport import Transport
from megazero.schedules.actions import Action, Kind, Schedule
from megazero.schedules.catalogue import make
from megazero.schedules.layers import add_transfers
from tests.comm.standins import NotedGroup, NotedSlot, Splits, all_connect
from tests.comm.test_communicators import pretended
from tests.ranks import run_ranks

CPU = torch.device("cpu")
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}
COMPUTES = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
SENDS = {Kind.SEND_FORWARD: 1, Kind.SEND_BACKWARD: -1}


def opened(rank: int, ranks: int, rank_of: tuple[int, ...], tensor: int = 1) -> Splits:
    """What opening a pipeline's channels calls on one rank."""
    splits = Splits(rank)
    comm = CommContext("nccl", split_group=splits)
    axis = lay_out(rank, ranks * tensor, pipeline=ranks, tensor=tensor, comm=comm)["pipeline"]
    Transport(axis, rank_of, torch.float32, CPU).open()
    return splits


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_channel_is_connected_and_nobody_waits_in_a_circle(name: str, ranks: int, tensor: int) -> None:
    rank_of = make(name, ranks, 1, SCHEDULES[name]).rank_of
    found = [opened(rank, ranks, rank_of, tensor) for rank in range(ranks * tensor)]
    assert all(one.calls == found[0].calls for one in found), "every rank calls every split"
    assert all(few for _, few in found[0].calls)
    edges = sum(low != high for low, high in pairwise(rank_of))
    assert len(found[0].calls) <= min(2 * edges, 8 * SCHEDULES[name]), "whatever the number of ranks"
    assert sum(len(one.own) for one in found) == 2 * 2 * edges * tensor
    for one in found:
        assert [use for _, use in one.uses] == sorted({use for _, use in one.uses}, key=[u for _, u in one.uses].index)
        assert {use for _, use in one.uses} == set(one.own), "each once"
    ways = [(way, use) for one in found for way, use in one.uses]
    assert all(ways.count(("send", use)) == ways.count(("recv", use)) == 1 for _, use in ways)
    assert all_connect([[use for _, use in one.uses] for one in found])


def test_hosts_that_wait_in_a_circle_are_seen() -> None:
    first, second = ((0, 1), 0), ((0, 1), 1)
    assert all_connect([[first, second], [first, second]])
    assert not all_connect([[first, second], [second, first]])


def step_ends(schedule: Schedule, *, connected: bool) -> bool:
    """Whether a step's hosts and devices come to its end, where each forward waits on the host for its input.

    A host that uses a channel for the first time waits until the other has come, unless all are connected.
    """
    ranks = schedule.ranks
    host, device, come, sent = [0] * len(ranks), [0] * len(ranks), {}, set()

    def needed(action: Action) -> tuple[int, int, int] | None:
        step = {Kind.FORWARD: -1, Kind.BACKWARD: 1, Kind.BACKWARD_INPUT: 1}.get(action.kind, 0)
        other = action.stage + step
        if not step or other not in range(schedule.num_stages):
            return None
        near = schedule.rank_of[other] == schedule.rank_of[action.stage]
        return None if near else (action.stage, step, action.micro_batch)

    def may_pass(rank: int, action: Action) -> bool:
        if action.kind in COMPUTES:
            waits = action.kind is Kind.FORWARD and (device[rank] < host[rank] or needed(action) not in {None, *sent})
            return not waits
        towards = SENDS.get(action.kind)
        backward = action.kind in (Kind.SEND_BACKWARD, Kind.RECEIVE_BACKWARD)
        channel = (action.stage + (towards or 0), backward)
        come.setdefault(channel, set()).add(rank)
        return connected or len(come[channel]) == 2

    before = None
    while before != (before := (tuple(host), tuple(device), len(sent), sum(map(len, come.values())))):
        for rank, actions in enumerate(ranks):
            while device[rank] < host[rank]:  # in order, as one stream
                action = actions[device[rank]]
                if action.kind in COMPUTES and needed(action) not in {None, *sent}:
                    break
                if action.kind in SENDS:
                    sent.add((action.stage + SENDS[action.kind], -SENDS[action.kind], action.micro_batch))
                device[rank] += 1
            if host[rank] < len(actions) and may_pass(rank, actions[host[rank]]):
                host[rank] += 1
    return all(device[rank] == len(actions) for rank, actions in enumerate(ranks))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_step_on_connected_channels_ends(name: str) -> None:
    cases = [(ranks, m) for ranks in (2, 3, 4, 8) for m in (1, 2, 3, 4, 8)]
    lowered = {case: add_transfers(make(name, *case, SCHEDULES[name])) for case in cases}
    assert all(step_ends(schedule, connected=True) for schedule in lowered.values())
    assert not all(step_ends(schedule, connected=False) for schedule in lowered.values()), "as the first step was"


def on_gloo(*, split_ranks: list[list[int]], timeout: timedelta, **_: object) -> dist.ProcessGroup | None:
    """`split_group` by groups of gloo, which real ranks can use here."""
    made = [(ranks, dist.new_group(ranks, timeout=timeout)) for ranks in split_ranks]
    return next((group for ranks, group in made if dist.get_rank() in ranks), None)  # type: ignore[return-value]


def through_nccl_s_code(grid: Grid) -> list[float]:
    axis = grid["pipeline"]
    noted: Any = NotedSlot()
    comm = replace(axis.comm, backend="nccl", split_group=on_gloo, shared_memory=None, status_slot=noted)
    axis = replace(axis, comm=comm)
    last = axis.size - 1
    channels = [Channel(2 * i, i, i + 1, "down") for i in range(last)]
    channels += [Channel(2 * i + 1, i + 1, i, "up") for i in range(last)]
    messages = PointToPoint(axis, channels, CPU)
    assert not axis.comm.ledger.traffic.get("pipeline"), "what connects is no traffic of a step"
    ends = [(each.source, each.target) for each in sorted(channels, key=lambda channel: channel.index)]
    peers = [[axis.ranks[sum(pair) - axis.rank]] for pair in ends if axis.rank in pair]
    assert [ranks for _, ranks, text in noted.begun if text.startswith("first message of channel")] == peers
    for channel in channels:
        for number in range(3):
            if channel.source == axis.rank:
                messages.send(channel, torch.tensor([100.0 * channel.index + number]))
    mine = [channel for channel in channels if channel.target == axis.rank]
    receipts = [messages.post(channel, torch.empty(1), "x") for channel in mine for _ in range(3)]
    came = [receipt.wait().item() for receipt in receipts]
    messages.finish()
    return came


def test_messages_behind_the_first_one_are_the_right_ones() -> None:
    found = run_ranks(3, through_nccl_s_code, pipeline=3)
    assert found == [[100.0, 101.0, 102.0], [0.0, 1.0, 2.0, 300.0, 301.0, 302.0], [200.0, 201.0, 202.0]]


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("build", ["new", "old"])
def test_the_options_of_a_communicator(few: bool, build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By stand-ins: no build of torch without CUDA has the class."""
    made, calls = [], []

    def options(*, is_high_priority_stream: bool) -> SimpleNamespace:
        config = SimpleNamespace(min_ctas=None, max_ctas=None) if build == "new" else SimpleNamespace()
        made.append(SimpleNamespace(is_high_priority_stream=is_high_priority_stream, config=config))
        return made[-1]

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=options), raising=False)
    monkeypatch.setattr(dist, "split_group", lambda **given: calls.append(given))
    for _ in range(2):
        nccl.split_group([range(2), range(2, 4)], timedelta(seconds=7), "tensor", few_ctas=few)
    assert made[0] is not made[1], "a split writes into them"
    assert calls[0]["split_ranks"] == [[0, 1], [2, 3]] and calls[0]["pg_options"] is made[0]
    assert calls[0]["timeout"] == made[0]._timeout == timedelta(seconds=7)
    assert calls[0]["group_desc"] == "tensor"
    assert made[0].is_high_priority_stream
    assert vars(made[0].config) == (
        {} if build == "old" else {"min_ctas": 1, "max_ctas": FEW_CTAS} if few else {"min_ctas": None, "max_ctas": None}
    )


def test_a_host_that_waits_in_a_first_use_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the others on the board, and by the monitor: from before the call, in which NCCL holds the host."""
    board, first_uses = StatusBoard(4), list[str]()
    slot = board.status_slot(0)
    slot.take("node7")
    seen: list[tuple[str, list[str], str]] = []  # what is called, first uses, the operation that is shown

    def see(what: str) -> None:
        operation = board.read(0).open
        assert operation is not None
        seen.append((what, list(first_uses), operation.text))

    noted, splits = NotedGroup._noted, Splits(0)

    def call(group: NotedGroup, what: str, work: dist.Work) -> dist.Work:
        see(what)
        return noted(group, what, work)

    def split(**given: Any) -> dist.ProcessGroup | None:
        see("split")
        return splits(**given)

    monkeypatch.setattr(NotedGroup, "_noted", call)
    comm = CommContext("nccl", split_group=split, status_slot=slot, first_uses=first_uses)
    with pretended(0, 4, splits.uses):
        grid = make_grid(comm=comm, device_type="cpu", tensor=2, pipeline=2, tied=False)
        Transport(grid["pipeline"], (0, 1), torch.float32, CPU).open()
    shown = [one for one in seen if one[0] == "split"]
    assert shown == [("split", ["first split of world"], "first split of world")] * len(splits.calls)
    assert [few for _, few in splits.calls].count(True) > 1, "of channels too"
    kinds = ["all_reduce", "all_gather", "reduce_scatter"]
    for name in ("world", "pipeline", "tensor"):
        own = [(what, uses) for what, uses, text in seen if text.startswith("first ") and text.endswith(f" of {name}")]
        assert [one for one in own if one[0] != "split"] == [(kind, [f"first {kind} of {name}"]) for kind in kinds]
    assert [one for one in seen if "channel" in one[2]] == [
        ("send", ["first message of channel 2"], "first message of channel 2"),
        ("recv", ["first message of channel 3"], "first message of channel 3"),
    ]
    assert first_uses == [] and board.read(0).open is None
