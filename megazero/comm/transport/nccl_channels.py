"""Send messages from one rank to one other through NCCL, with a communicator for each channel."""

from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.comm.axes import P2P, Channel
from megazero.comm.grid import Axis, lines
from megazero.comm.nccl import synchronize


class NcclChannels:
    """Messages through NCCL, a communicator for each channel: the two ends queue the same messages in the same order.

    Every rank of the world calls each split, in the same order. One split makes the communicators of several channels.
    """

    unsent: int | None = None  # the host never waits for a message

    def __init__(self, axis: Axis, channels: list[Channel], everyone: Sequence[Channel], device: torch.device):
        self._groups: dict[int, dist.ProcessGroup] = {}
        self._works: deque[dist.Work] = deque()  # sends under way: each keeps its message alive
        self._device = device
        for some in _rounds(everyone):
            world = axis.size * axis.stride  # a pipeline is the slowest axis
            ends = [(channel.source, channel.target) for channel in some]
            pairs = [sorted((ranks[one], ranks[other])) for one, other in ends for ranks in lines(axis, world)]
            own = next((channel for channel in some if axis.rank in (channel.source, channel.target)), None)
            peer = "" if own is None else axis.ranks[own.source + own.target - axis.rank]
            group = axis.comm.split(f"{P2P} {peer}", pairs, world, few_ctas=True)
            if own is not None:
                assert group is not None, "this rank is one of the two"
                self._groups[own.index] = group
        for channel in sorted(channels, key=lambda channel: channel.index):
            self._connect(axis, channel)

    def _connect(self, axis: Axis, channel: Channel) -> None:
        """Send one element through a channel and wait for it.

        The first message blocks both hosts until both have called it. Every rank connects its channels in the order of
        their index. So both ranks of the first unconnected channel reach it, and ranks never wait in a circle; in the
        order of a schedule they could (tests/comm/test_connect.py).
        """
        sends, x = axis.rank == channel.source, torch.zeros(1, device=self._device)
        peer = axis.ranks[channel.target if sends else channel.source]
        with axis.comm.calling(f"channel {channel.index}", P2P, range(peer, peer + 1), "message"):
            if sends:
                self.send(channel, 0, x)
                self.finish()
            else:
                self.post(channel, 0, x)[0]()
            synchronize(self._device)

    def send(self, channel: Channel, number: int, x: Tensor) -> None:
        """Queue a message on the GPU."""
        while self._works and self._works[0].is_completed():
            self._works.popleft()
        work = dist.isend(x, group=self._groups[channel.index], group_dst=int(channel.target > channel.source))
        assert work is not None, "this process is not on the channel"
        self._works.append(work)

    def post(self, channel: Channel, number: int, into: Tensor) -> tuple[Callable[[], Tensor], Callable[[], bool]]:
        """Queue the receipt of a message; return a function that waits for it, and one that is always true."""
        work = dist.irecv(into, group=self._groups[channel.index], group_src=int(channel.source > channel.target))
        assert work is not None, "this process is not on the channel"

        def finish() -> Tensor:
            work.wait()  # makes the stream wait, not the host
            return into

        return finish, lambda: True

    def finish(self) -> None:
        """Make the stream wait for all messages that were sent."""
        while self._works:
            self._works.popleft().wait()


def _rounds(everyone: Sequence[Channel]) -> list[list[Channel]]:
    """Divide the channels among few splits, in each of which a rank has at most one channel."""
    rounds: list[list[Channel]] = []
    for channel in everyone:
        ends = {channel.source, channel.target}
        free = (some for some in rounds if ends.isdisjoint(end for one in some for end in (one.source, one.target)))
        if (found := next(free, None)) is None:
            rounds.append(found := [])
        found.append(channel)
    return rounds
