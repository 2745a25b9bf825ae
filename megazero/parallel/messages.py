"""Messages from one rank to one other, as a pipeline needs them.

A message is named by a channel (from which stage to which) and its number there: both sides know the name, so nobody
sends shapes or asks what comes next. Sending never waits: what finds no room is kept, and handed over whenever this
rank waits for something. A receive is posted before the message is needed, into memory of its own.

On one host messages go through shared memory (`shared.py`), else through gloo's sockets. On NCCL each channel has a
communicator of its own, because there messages have no names: what is sent first is received first.
"""

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.parallel.board import P2P
from megazero.parallel.exchange import CollectiveError
from megazero.parallel.grid import Axis
from megazero.parallel.shared import SLOT_BYTES, Mail

_NUMBER_BITS, _PIECE_BITS = 36, 12  # of a message's key; the rest is the channel's


@dataclass(frozen=True)
class Channel:
    """A one-way road between two ranks of an axis.

    Attributes:
        index: which of all channels it is; the same on both sides.
        source, target: ranks on the axis.
        name: of what goes there, for the ledger and the board: "activations", "gradients".
    """

    index: int
    source: int
    target: int
    name: str


class Receipt:
    """A message that is on its way. `wait` gives it; to be called once."""

    def __init__(self, axis: Axis, source: int, text: str, finish: Callable[[], Tensor], came: Callable[[], bool]):
        self._axis, self._source, self._text, self._finish, self._came = axis, source, text, finish, came

    def wait(self) -> Tensor:
        """Raises CollectiveError: it did not come within the axis' timeout, or the connection broke."""
        if self._came():
            return self._finish()
        rank, seat = self._axis.ranks[self._source], self._axis.wire.seat
        seat.begin(P2P, range(rank, rank + 1), self._text)
        with torch.profiler.record_function(f"wait for {self._text}"):
            try:
                message = self._finish()
            except (RuntimeError, TimeoutError) as error:
                raise CollectiveError(P2P, str(error)) from None
        seat.end(P2P)
        return message


class Carrier(Protocol):
    """How messages go."""

    def send(self, channel: Channel, number: int, x: Tensor) -> None: ...

    def post(self, channel: Channel, number: int, into: Tensor) -> tuple[Callable[[], Tensor], Callable[[], bool]]:
        """(waits and gives the message, whether it has come)."""
        ...

    def finish(self) -> None: ...


class Messages:
    """The messages of one rank along an axis.

    Args:
        channels: all that this rank sends or receives on, in order of their index.
    """

    def __init__(self, axis: Axis, channels: list[Channel]):
        self._axis = axis
        self._carrier = _carrier(axis, channels)

    def send(self, channel: Channel, x: Tensor) -> None:
        """The next message of a channel. x is contiguous, and nobody writes to it until `finish`."""
        assert x.is_contiguous(), f"a strided view: {tuple(x.shape)}, strides {x.stride()}"
        number = self._number(channel, "sent")
        self._axis.wire.ledger.add(self._axis.name, channel.name, x.numel(), x.element_size())
        self._carrier.send(channel, number, x)

    def post(self, channel: Channel, into: Tensor, what: str) -> Receipt:
        """The next message of a channel will come into `into`.

        Args:
            what: as the board shows it to others while this rank waits.
        """
        finish, came = self._carrier.post(channel, self._number(channel, "posted"), into)
        return Receipt(self._axis, channel.source, what, finish, came)

    def finish(self) -> None:
        """Returns when nothing that was sent is kept any more.

        Raises:
            CollectiveError: somebody does not take it within the axis' timeout, or the connection broke.
        """
        try:
            self._carrier.finish()
        except (RuntimeError, TimeoutError) as error:
            raise CollectiveError(P2P, str(error)) from None

    def _number(self, channel: Channel, end: str) -> int:
        """Counted by the wire, so that no two messages of a run ever have one name."""
        return self._axis.wire.reserve(f"{self._axis.name} {channel.index} {end}", 1)


def _carrier(axis: Axis, channels: list[Channel]) -> Carrier:
    if axis.wire.backend == "nccl":
        return _Nccl(axis, channels)
    mail = axis.wire.mail
    if mail is not None and mail.reached.issuperset(axis.ranks):
        return _Parcels(axis, mail)
    return _Sockets(axis)


class _Parcels:
    """Through shared memory, in pieces of a slot."""

    def __init__(self, axis: Axis, mail: Mail):
        self._axis, self._mail = axis, mail
        self._outgoing: deque[tuple[int, Tensor]] = deque()
        self._last = axis.rank  # whom something was sent to

    def send(self, channel: Channel, number: int, x: Tensor) -> None:
        self._last = channel.target
        self._outgoing.extend(_pieces(channel, number, x))
        if self not in self._mail.rounds:
            self._mail.rounds.append(self)
        self.take_in()

    def take_in(self) -> None:
        """Hands over what there is room for."""
        while self._outgoing and self._mail.hand_over(*self._outgoing[0]):
            self._outgoing.popleft()
        if not self._outgoing and self in self._mail.rounds:
            self._mail.rounds.remove(self)

    def post(self, channel: Channel, number: int, into: Tensor) -> tuple[Callable[[], Tensor], Callable[[], bool]]:
        parcel = _Expected(self._mail, self._axis.ranks[channel.source], deque(_pieces(channel, number, into)))
        self._mail.rounds.append(parcel)

        def finish() -> Tensor:
            self._mail.wait_until(parcel.came, parcel.sender)
            return into

        return finish, parcel.came

    def finish(self) -> None:
        self._mail.wait_until(self._all_gone, self._axis.ranks[self._last])

    def _all_gone(self) -> bool:
        self.take_in()
        return not self._outgoing


class _Expected:
    """A message whose pieces are taken as they come."""

    def __init__(self, mail: Mail, sender: int, pieces: deque[tuple[int, Tensor]]):
        self._mail, self.sender, self._pieces = mail, sender, pieces

    def take_in(self) -> None:
        while self._pieces and self._mail.collect(self.sender, *self._pieces[0]):
            self._pieces.popleft()
        if not self._pieces and self in self._mail.rounds:
            self._mail.rounds.remove(self)

    def came(self) -> bool:
        self.take_in()
        return not self._pieces


def _pieces(channel: Channel, number: int, x: Tensor) -> list[tuple[int, Tensor]]:
    """(key, piece) of each part of x that fits into a slot."""
    flat = x.view(-1)
    length = SLOT_BYTES // flat.element_size()
    cuts = range(0, max(len(flat), 1), length)
    assert len(cuts) < 1 << _PIECE_BITS, f"{x.nbytes} bytes are too many for one message"
    name = channel.index + 1 << _NUMBER_BITS | number
    return [(name << _PIECE_BITS | i, flat[cut : cut + length]) for i, cut in enumerate(cuts)]


class _Sockets:
    """Through gloo, which sends in the background. It tells only who waits for it that it has sent."""

    def __init__(self, axis: Axis):
        self._axis = axis
        self._sent: list[tuple[dist.Work | None, Tensor]] = []

    def send(self, channel: Channel, number: int, x: Tensor) -> None:
        tag = _tag(channel, number, x)
        self._sent.append((dist.isend(x, group=self._axis.group, group_dst=channel.target, tag=tag), x))

    def post(self, channel: Channel, number: int, into: Tensor) -> tuple[Callable[[], Tensor], Callable[[], bool]]:
        tag = _tag(channel, number, into)
        work = dist.irecv(into, group=self._axis.group, group_src=channel.source, tag=tag)
        assert work is not None, "this process is not on the axis"

        def finish() -> Tensor:
            work.wait(self._axis.wire.timeout)
            return into

        return finish, work.is_completed

    def finish(self) -> None:
        sent, self._sent = self._sent, []
        for work, _ in sent:
            if work is not None:
                work.wait(self._axis.wire.timeout)


class _Nccl:
    """A communicator for each channel: the two ends queue the same messages in the same order."""

    def __init__(self, axis: Axis, channels: list[Channel]):
        self._ranks, self._groups = axis.ranks, {}
        for channel in channels:  # in order of their index on every rank, so that no two wait for each other
            ranks = [axis.ranks[channel.source], axis.ranks[channel.target]]
            self._groups[channel.index] = dist.new_group(
                ranks, timeout=axis.wire.timeout, backend="nccl", use_local_synchronization=True
            )

    def send(self, channel: Channel, number: int, x: Tensor) -> None:
        dist.isend(x, self._ranks[channel.target], group=self._groups[channel.index])

    def post(self, channel: Channel, number: int, into: Tensor) -> tuple[Callable[[], Tensor], Callable[[], bool]]:
        work = dist.irecv(into, self._ranks[channel.source], group=self._groups[channel.index])
        assert work is not None, "this process is not on the channel"

        def finish() -> Tensor:
            work.wait()  # makes the stream wait, not the host
            return into

        return finish, lambda: True

    def finish(self) -> None:
        """torch keeps what is being sent."""


def _tag(channel: Channel, number: int, x: Tensor) -> int:
    return zlib.crc32(f"{channel} {number} {x.dtype} {list(x.shape)}".encode()) & 0x7FFFFFFF
