"""Send messages from one rank to one other, as a pipeline needs them.

A message is identified by its channel (source and target stage) and its number there. Both sides know these, so no
shape and no request is sent. Sending never waits: a message without room is kept, and sent when this rank next waits
for something. A receive is posted before the message is needed, into memory of its own.

On one host messages go through shared memory (`shared_memory.py`), else through gloo's sockets; messages on a device
that gloo cannot send from are copied to the host first, and on arrival to the device (`host_staging.py`). On NCCL each
channel has a communicator of its own, because NCCL's messages have no tags: the first sent is the first received.
"""

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.comm.axes import P2P, Channel
from megazero.comm.grid import Axis
from megazero.comm.transport.exchange import CollectiveError
from megazero.comm.transport.host_staging import NOTHING, HostStaging
from megazero.comm.transport.nccl_channels import NcclChannels
from megazero.comm.transport.shared_memory import SLOT_BYTES, SharedMemoryTransport

_NUMBER_BITS, _PIECE_BITS = 36, 12  # of a message's key; the other bits are the channel's


class Receipt:
    """A message on its way; call `wait` once to get it."""

    def __init__(self, axis: Axis, source: int, text: str, finish: Callable[[], Tensor], came: Callable[[], bool]):
        self._axis, self._source, self._text, self._finish, self._came = axis, source, text, finish, came

    def wait(self) -> Tensor:
        """Wait for the message and return it.

        Raises:
            CollectiveError: it did not arrive within the axis' timeout, or the connection broke.
        """
        with _broken_is_collective():
            if self._came():
                return self._finish()
            rank, status_slot = self._axis.ranks[self._source], self._axis.comm.status_slot
            status_slot.begin(P2P, range(rank, rank + 1), self._text)
            with torch.profiler.record_function(f"wait for {self._text}"):
                message = self._finish()
        status_slot.end(P2P)
        return message


@contextmanager
def _broken_is_collective() -> Iterator[None]:
    """Turn the backends' errors for a peer that is gone or does not answer into CollectiveError."""
    try:
        yield
    except (RuntimeError, TimeoutError) as error:
        raise CollectiveError(P2P, str(error)) from None


class PointToPoint:
    """The messages of one rank along an axis.

    Args:
        everyone: all channels of the axis, in order of their index; the same on all its ranks. Every rank of the world
            makes its `PointToPoint` at the same point.
        device: the device of the messages.
    """

    def __init__(self, axis: Axis, everyone: Sequence[Channel], device: torch.device):
        self._axis = axis
        self._carrier = _carrier(axis, everyone, device)
        self._sent: list[HostStaging] = []  # the carrier uses their memory until it has sent all

    def send(self, channel: Channel, x: Tensor) -> None:
        """Send the next message of a channel. x is contiguous, and must not be written to until `finish`.

        Raises:
            CollectiveError: the connection broke.
        """
        assert x.is_contiguous(), f"a strided view: {tuple(x.shape)}, strides {x.stride()}"
        number = self._number(channel, "sent")
        self._axis.comm.ledger.add(self._axis.name, channel.name, x.numel(), x.element_size())
        if (pool := self._axis.comm.host_staging) is not None:
            staging = HostStaging(x, pool)
            self._sent.append(staging)
            x = staging.host.view(x.shape)
        with _broken_is_collective():
            self._carrier.send(channel, number, x)

    def post(self, channel: Channel, into: Tensor, what: str) -> Receipt:
        """Post the receive of a channel's next message into `into`.

        Args:
            what: the text that the status board shows while this rank waits.

        Raises:
            CollectiveError: the connection broke.
        """
        number, pool = self._number(channel, "posted"), self._axis.comm.host_staging
        staging = None if pool is None else HostStaging(into, pool, NOTHING)
        place = into if staging is None else staging.host.view(into.shape)
        with _broken_is_collective():
            finish, came = self._carrier.post(channel, number, place)
        if staging is not None:
            finish = _landing(finish, staging, into)
        return Receipt(self._axis, channel.source, what, finish, came)

    def finish(self) -> None:
        """Wait until all messages have been sent.

        Raises:
            CollectiveError: a rank does not receive one within the axis' timeout, or the connection broke.
        """
        with _broken_is_collective():
            rank, status_slot = self._carrier.unsent, self._axis.comm.status_slot
            if rank is not None:
                status_slot.begin(P2P, range(rank, rank + 1), "room for a message to this rank")
            self._carrier.finish()
        while self._sent:
            self._sent.pop().end()
        if rank is not None:
            status_slot.end(P2P)

    def _number(self, channel: Channel, end: str) -> int:
        """Return the next message number at an `end` of a channel, "sent" or "posted"; it is used only once."""
        return self._axis.comm.reserve(f"{self._axis.name} {channel.index} {end}", 1)


def _landing(finish: Callable[[], Tensor], staging: HostStaging, into: Tensor) -> Callable[[], Tensor]:
    """Return a function that waits for a message on the host and copies it to the device."""

    def landed() -> Tensor:
        finish()
        staging.end(into)
        return into

    return landed


def _carrier(axis: Axis, everyone: Sequence[Channel], device: torch.device) -> "_Carrier":
    channels = [channel for channel in everyone if axis.rank in (channel.source, channel.target)]
    if axis.comm.backend == "nccl":
        return NcclChannels(axis, channels, everyone, device)
    shared_memory = axis.comm.shared_memory
    if shared_memory is not None and shared_memory.reached.issuperset(axis.ranks):
        return _SharedMemory(axis, shared_memory, channels)
    return _Sockets(axis)


class _SharedMemory:
    """Messages through shared memory, in pieces of a slot."""

    def __init__(self, axis: Axis, shared_memory: SharedMemoryTransport, channels: list[Channel]):
        self._axis, self._shared_memory = axis, shared_memory
        self._sources = sorted({axis.ranks[c.source] for c in channels if c.target == axis.rank})
        self._outgoing: deque[tuple[int, int, Tensor]] = deque()  # target, key, piece
        shared_memory.rounds.append(self.take_in)

    @property
    def unsent(self) -> int | None:
        return self._outgoing[0][0] if self._outgoing else None

    def send(self, channel: Channel, number: int, x: Tensor) -> None:
        target = self._axis.ranks[channel.target]
        self._outgoing.extend((target, key, piece) for key, piece in _pieces(channel, number, x))
        self.take_in()

    def take_in(self) -> None:
        """Send the messages that find room, and receive those that have arrived."""
        while self._outgoing and self._shared_memory.send(*self._outgoing[0]):
            self._outgoing.popleft()
        for sender in self._sources:
            self._shared_memory.collect(sender)

    def post(self, channel: Channel, number: int, into: Tensor) -> tuple[Callable[[], Tensor], Callable[[], bool]]:
        sender, pieces = self._axis.ranks[channel.source], _pieces(channel, number, into)
        for key, piece in pieces:
            self._shared_memory.expect(sender, key, piece)

        def came() -> bool:
            self.take_in()
            return all((sender, key) not in self._shared_memory.expected for key, _ in pieces)

        def finish() -> Tensor:
            self._shared_memory.wait_until(came, sender)
            return into

        return finish, came

    def finish(self) -> None:
        while (target := self.unsent) is not None:
            self._shared_memory.wait_until(lambda target=target: self._passed(target), target)

    def _passed(self, target: int) -> bool:
        """Advance sends and receives; return whether the next unsent message, if any, is not for `target`."""
        self.take_in()
        return self.unsent != target


def _pieces(channel: Channel, number: int, x: Tensor) -> list[tuple[int, Tensor]]:
    """Return (key, piece) of each part of x that fits into a slot."""
    flat = x.view(-1)
    length = SLOT_BYTES // flat.element_size()
    cuts = range(0, max(len(flat), 1), length)
    assert len(cuts) < 1 << _PIECE_BITS, f"{x.nbytes} bytes are too many for one message"
    name = channel.index + 1 << _NUMBER_BITS | number
    return [(name << _PIECE_BITS | i, flat[cut : cut + length]) for i, cut in enumerate(cuts)]


class _Sockets:
    """Messages through gloo, which sends in the background and reports a send as done only when it is waited for."""

    def __init__(self, axis: Axis):
        self._axis = axis
        self._sent: deque[tuple[int, dist.Work | None, Tensor]] = deque()  # target, work, message to keep alive

    @property
    def unsent(self) -> int | None:
        return self._sent[0][0] if self._sent else None

    def send(self, channel: Channel, number: int, x: Tensor) -> None:
        work = dist.isend(x, group=self._axis.group, group_dst=channel.target, tag=_tag(channel, number, x))
        self._sent.append((self._axis.ranks[channel.target], work, x))

    def post(self, channel: Channel, number: int, into: Tensor) -> tuple[Callable[[], Tensor], Callable[[], bool]]:
        work = dist.irecv(into, group=self._axis.group, group_src=channel.source, tag=_tag(channel, number, into))
        assert work is not None, "this process is not on the axis"

        def finish() -> Tensor:
            work.wait(self._axis.comm.timeout)
            return into

        return finish, work.is_completed

    def finish(self) -> None:
        while self._sent:
            _, work, _ = self._sent.popleft()
            if work is not None:
                work.wait(self._axis.comm.timeout)


def _tag(channel: Channel, number: int, x: Tensor) -> int:
    return zlib.crc32(f"{channel} {number} {x.dtype} {list(x.shape)}".encode()) & 0x7FFFFFFF


# `unsent` is the global rank for which the next unsent message is; None: no message waits. `post` returns a function
# that waits for the message and returns it, and one that returns whether it has arrived.
_Carrier = NcclChannels | _SharedMemory | _Sockets
