"""Send messages from one rank to one other through NCCL, a communicator for each channel."""

from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.comm.axes import P2P, Channel
from megazero.comm.device_queue import Queued
from megazero.comm.grid import Axis, lines
from megazero.comm.nccl import synchronize


class NcclChannels:
    """Messages through NCCL, a communicator for each channel: the two ends queue the same messages in the same order.

    Every rank of the world calls each split, in one order. One split makes the communicators of several channels.
    """

    def __init__(self, axis: Axis, channels: list[Channel], everyone: Sequence[Channel], device: torch.device):
        self._axis, self._queue = axis, axis.comm.device_queue
        self._groups: dict[int, dist.ProcessGroup] = {}
        self._works: deque[tuple[dist.Work, Queued]] = deque()  # sends
        self._device = device
        for some in _rounds(everyone):
            world = axis.size * axis.stride  # a pipeline is the slowest axis
            ends = [(channel.source, channel.target) for channel in some]
            pairs = [sorted((ranks[one], ranks[other])) for one, other in ends for ranks in lines(axis, world)]
            group = axis.comm.split(pairs, world, few_ctas=True)
            for channel in some:
                if axis.rank in (channel.source, channel.target):
                    assert group is not None, "this rank is one of the two"
                    self._groups[channel.index] = group
        for channel in sorted(channels, key=lambda channel: channel.index):
            self._connect(axis, channel)

    def _connect(self, axis: Axis, channel: Channel) -> None:
        """Send one element through a channel and wait for it.

        The first message blocks both hosts until both have come to it. Every rank goes through its channels in the
        order of their index. So both ranks of the first one that is not connected come to it, and nobody waits in a
        circle; in the order of a schedule they may (tests/comm/test_connect.py).
        """
        sends, x = axis.rank == channel.source, torch.zeros(1, device=self._device)
        peer = axis.ranks[channel.target if sends else channel.source]
        with axis.comm.calling(_communicator(channel), P2P, range(peer, peer + 1), "message"):
            if sends:
                self.send(channel, 0, x)
                self.finish()
            else:
                self.post(channel, 0, x)[0]()
            synchronize(self._device)

    @property
    def unsent(self) -> int | None:
        return None  # the host never waits

    def send(self, channel: Channel, number: int, x: Tensor) -> None:
        while self._works and self._works[0][0].is_completed():
            _, queued = self._works.popleft()  # each keeps what it sends
            queued.work = None
        work = dist.isend(x, group=self._groups[channel.index], group_dst=int(channel.target > channel.source))
        assert work is not None, "this process is not on the channel"
        self._works.append((work, self._follow(channel, channel.target, work)))

    def post(self, channel: Channel, number: int, into: Tensor) -> tuple[Callable[[], Tensor], Callable[[], bool]]:
        source = int(channel.source > channel.target)
        work = dist.irecv(into, group=self._groups[channel.index], group_src=source)
        assert work is not None, "this process is not on the channel"
        queued = self._follow(channel, channel.source, work)

        def finish() -> Tensor:
            work.wait()  # makes the stream wait, not the host
            self._queue.waited(queued, self._device)
            return into

        return finish, lambda: True

    def finish(self) -> None:
        while self._works:
            work, queued = self._works.popleft()
            work.wait()
            self._queue.waited(queued, self._device)

    def _follow(self, channel: Channel, other: int, work: dist.Work) -> Queued:
        """Show a message to the monitor."""
        rank = self._axis.ranks[other]
        return self._queue.put(_communicator(channel), P2P, range(rank, rank + 1), work, channel.name)


def _communicator(channel: Channel) -> str:
    return f"channel {channel.index}"


def _rounds(everyone: Sequence[Channel]) -> list[list[Channel]]:
    """Share out channels to few splits: in each a rank has one channel at most."""
    rounds: list[list[Channel]] = []
    for channel in everyone:
        ends = {channel.source, channel.target}
        free = (some for some in rounds if ends.isdisjoint(end for one in some for end in (one.source, one.target)))
        if (found := next(free, None)) is None:
            rounds.append(found := [])
        found.append(channel)
    return rounds
