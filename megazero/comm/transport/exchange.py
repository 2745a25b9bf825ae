"""Exchange messages between all ranks of an axis: the basis of all collectives on gloo.

The data goes through shared memory if all ranks of the axis are on one host (`shared_memory.py`), else through
gloo's sockets. A long message goes in pieces, so that the memory between sender and receiver has a constant size (the
constant buffers of the ZeRO paper, section 6.2): a slot of the outbox, or two received pieces.

Received messages are passed to `consume`, piece by piece, without a copy; they are not stored.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.comm.grid import Axis
from megazero.comm.pool import same_place
from megazero.comm.transport.shared_memory import SLOT_BYTES, Label, Message, OtherOperationError, SharedMemoryTransport

Consume = Callable[[slice, list[Tensor]], None]

_WINDOW = 2  # pieces under way through sockets
_LINE = 64  # bytes; pieces are multiples of a cache line


class CollectiveError(RuntimeError):
    """An error for an operation on `axis` that did not end: a rank died, did not take part, or called another one.

    Attributes:
        rank: the global rank that is known to have called another operation; None: no such rank is known.
    """

    def __init__(self, axis: str, reason: str, rank: int | None = None):
        super().__init__(f"{axis} axis: {reason}")
        self.axis, self.rank = axis, rank


def swap(axis: Axis, tag: int, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> "Exchange":
    """Return the exchange of an all-to-all, or of an all-gather, not started.

    Args:
        outgoing: one message for all ranks, or one for each, by rank; flat, of equal length. None goes to itself.
        incoming: by rank, the flat tensor that receives the rank's message.
    """
    targets = [incoming[k] for k in others(axis)]

    def put(cut: slice, theirs: list[Tensor]) -> None:
        for target, part in zip(targets, theirs, strict=True):
            if not same_place(target[cut], part):
                target[cut].copy_(part)

    sends = outgoing if len(outgoing) == 1 else [outgoing[k] for k in others(axis)]
    return Exchange(axis, tag, sends, put, into=targets)


def others(axis: Axis) -> list[int]:
    """Return the other ranks of an axis, starting after this one, so that not all ranks send to rank 0 first."""
    return [(axis.rank + i) % axis.size for i in range(1, axis.size)]


class Exchange:
    """One round of messages; `start` sends, `wait` returns when all have arrived and been consumed.

    Args:
        axis: the axis of the ranks that take part.
        tag: the same on all ranks, and almost always different for every round under way.
        sends: flat tensors of equal length: one message for all, or one for each of `others`, in their order. Only
            `consume` may change them before the end.
        consume: called once for each piece with its slice of the messages, and that slice of the received messages, in
            the order of `others`. It may be called in any wait of this thread after `start`.
        into: flat tensors, one for each of `others`, into which sockets receive the messages without staging;
            `consume` gets slices of them.
    """

    def __init__(
        self, axis: Axis, tag: int, sends: Sequence[Tensor], consume: Consume, into: Sequence[Tensor] | None = None
    ):
        self._axis, self._tag, self._sends, self._consume, self._into = axis, tag, sends, consume, into
        shared_memory = axis.comm.shared_memory
        self._shared_memory = (
            shared_memory if shared_memory is not None and shared_memory.reached.issuperset(axis.ranks) else None
        )
        staged = axis.comm.bucket // (axis.size - 1) // _WINDOW
        limit = SLOT_BYTES // len(sends) if self._shared_memory is not None else staged
        self._piece = max(limit // _LINE * _LINE, _LINE) // sends[0].element_size()
        length = len(sends[0])
        self._cuts = [slice(i, min(i + self._piece, length)) for i in range(0, max(length, 1), self._piece)]
        self._place = axis.comm.reserve(axis.name, len(self._cuts))
        self._rounds: list[_Round] = []

    @property
    def unread(self) -> int:
        """Return how many messages stay in this rank's outbox until the others have read them."""
        return len(self._cuts) if self._shared_memory is not None else 0

    def start(self) -> "Exchange":
        """Send the first pieces; return this exchange.

        Raises:
            CollectiveError: the connection broke, or the readers make no room.
        """
        try:
            if self._shared_memory is not None:
                self._post(self._shared_memory)
            else:
                self._works = [self._send_piece(cut) for cut in self._cuts[:_WINDOW]]
        except (RuntimeError, TimeoutError) as error:  # TimeoutError: the readers make no room
            raise CollectiveError(self._axis.name, str(error)) from None
        return self

    def wait(self) -> None:
        """Wait until all messages have arrived and been consumed.

        Raises:
            CollectiveError: a message did not arrive within the axis' timeout, the connection broke, or another rank of
                this host has called another operation.
        """
        try:
            if self._shared_memory is not None:
                for round_ in self._rounds:
                    round_.finish()
            else:
                self._receive_pieces()
        except OtherOperationError as error:
            raise CollectiveError(self._axis.name, str(error), error.rank) from None
        except (RuntimeError, TimeoutError) as error:
            raise CollectiveError(self._axis.name, str(error)) from None

    def _post(self, shared_memory: SharedMemoryTransport) -> None:
        axis, sends, use = self._axis, self._sends, self._consume
        room, readers = self._piece * sends[0].element_size(), [axis.ranks[k] for k in others(axis)]
        starts = [((axis.rank - k) % axis.size - 1) * room if len(sends) > 1 else 0 for k in others(axis)]

        def consume(messages: list[Message], cut: slice) -> None:  # it has no reference to the exchange, which holds it
            like = sends[0][cut]
            use(cut, [shared_memory.view(message, at, like) for message, at in zip(messages, starts, strict=True)])

        for number, cut in enumerate(self._cuts):
            label = Label(self._place + number, self._tag)
            shared_memory.post(axis.name, label, [send[cut] for send in sends], room, readers)
            round_ = _Round(shared_memory, readers, axis.name, label, partial(consume, cut=cut))
            self._rounds.append(round_)
            shared_memory.rounds.append(round_.take_in)

    def _send_piece(self, cut: slice) -> tuple[list[Tensor], list[dist.Work]]:
        axis, peers = self._axis, others(self._axis)
        outgoing = self._sends if len(self._sends) > 1 else [self._sends[0]] * len(peers)
        like = self._sends[0][cut]
        if self._into is not None:
            received = [place[cut] for place in self._into]
        else:
            received = [axis.comm.staging.take(like.nbytes).view(like.dtype) for _ in peers]
        works = [
            dist.irecv(x, group=axis.group, group_src=k, tag=self._tag) for k, x in zip(peers, received, strict=True)
        ]
        for k, x in zip(peers, outgoing, strict=True):
            works.append(dist.isend(x[cut], group=axis.group, group_dst=k, tag=self._tag))
        return received, [work for work in works if work is not None]

    def _receive_pieces(self) -> None:
        """Receive and consume the pieces through gloo, which pairs messages of one tag in the order they were sent in.

        This reads no messages from shared memory meanwhile. If ranks use shared memory on one axis and sockets on
        another, do not wait for a socket operation between the start and the end of a shared-memory operation that has
        more pieces than there are slots: four ranks could wait in a circle.
        """
        for number, cut in enumerate(self._cuts):
            received, works = self._works[number]
            for work in works:
                work.wait(self._axis.comm.timeout)
            self._consume(cut, received)
            for tensor in received if self._into is None else ():
                self._axis.comm.staging.give(tensor.view(torch.uint8))
            if number + _WINDOW < len(self._cuts):
                self._works.append(self._send_piece(self._cuts[number + _WINDOW]))


@dataclass(eq=False)
class _Round:
    """The receipt of one piece of an exchange from the outboxes of the other ranks, `senders`."""

    shared_memory: SharedMemoryTransport
    senders: Sequence[int]
    axis: str
    label: Label
    consume: Callable[[list[Message]], None]
    done: bool = False

    def take_in(self) -> None:
        """Consume the others' messages if all have arrived, to make room in their outboxes."""
        if not self.done and all(self.shared_memory.find(rank, self.axis, self.label) for rank in self.senders):
            self.finish()

    def finish(self) -> None:
        """Wait for the others' messages, consume and acknowledge them."""
        if self.done:
            return
        self.done = True  # from here on no other code takes them in
        self.shared_memory.rounds.remove(self.take_in)
        messages = [self.shared_memory.wait_for(rank, self.axis, self.label) for rank in self.senders]
        self.consume(messages)
        for message in messages:
            self.shared_memory.acknowledge(message)
