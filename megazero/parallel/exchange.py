"""Every rank of an axis has a message for every other: what all collectives on gloo are made of.

The data goes through shared memory where all ranks of the axis are on one host and a message fits (`shared.py`), else
through gloo's sockets. Both sides can tell from the sizes, so they always choose alike.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.parallel.grid import Axis
from megazero.parallel.shared import SLOT_BYTES, Label, Letter, Mail


class CollectiveError(RuntimeError):
    """An operation on `axis` did not end: a rank died, does not come, or called another one. The board knows more."""

    def __init__(self, axis: str, reason: str):
        super().__init__(f"{axis} axis: {reason}")
        self.axis = axis


def others(axis: Axis) -> list[int]:
    """The other ranks of an axis, each starting behind itself, so that not everybody sends to rank 0 first."""
    return [(axis.rank + i) % axis.size for i in range(1, axis.size)]


class Exchange:
    """One round of messages, sent when this is made.

    Args:
        axis: whose ranks take part.
        label: the same on all ranks, and another one for every round under way.
        sends: one message, for all; or one for each of `others`, in their order. Not to be changed until received.
        receives: where the messages of the others belong, in their order.
        peek: no need to put them there: `wait` gives them wherever they lie, until `release`.
        room: bytes of the largest message; the same number on all ranks.
    """

    def __init__(
        self, axis: Axis, label: Label, sends: Sequence[Tensor], receives: Sequence[Tensor], *, peek: bool, room: int
    ):
        self._axis, self._label, self._sends, self._receives, self._peek = axis, label, sends, receives, peek
        self._room = room
        mail = axis.wire.mail
        near = mail is not None and room * len(sends) <= SLOT_BYTES and mail.reached.issuperset(axis.ranks)
        self._mail = mail if near else None
        self._letters: list[Letter] = []
        self._taken: list[Tensor] | None = None
        try:
            if self._mail is not None:
                readers = [axis.ranks[k] for k in others(axis)]
                self._mail.post(axis.name, label, sends, room, readers)
                self._mail.rounds.append(self)
            else:
                self._start_sockets()
        except (RuntimeError, TimeoutError) as error:  # the connection is gone, or nobody reads
            raise CollectiveError(axis.name, str(error)) from None

    def wait(self) -> list[Tensor]:
        """The others' messages, in the order of `others`.

        Raises:
            CollectiveError: one did not come within the axis' timeout, or the connection broke.
        """
        try:
            if self._mail is not None:
                return self._read(self._mail)
            for work in self._works:
                work.wait(self._axis.wire.timeout)
        except (RuntimeError, TimeoutError) as error:
            raise CollectiveError(self._axis.name, str(error)) from None
        return self._received

    def release(self) -> None:
        """The received messages will not be looked at again."""
        for letter in self._letters:
            assert self._mail is not None
            self._mail.acknowledge(letter)
        self._letters = []

    def take_in(self) -> None:
        """Copies the others' messages, if all have come, for a later `wait`: somebody needs the room."""
        mail, axis = self._mail, self._axis
        assert mail is not None
        if self._taken is not None:
            return
        letters = [mail.find(axis.ranks[k], axis.name, self._label) for k in others(axis)]
        found = [letter for letter in letters if letter is not None]
        if len(found) == len(letters):
            self._letters = found
            self._taken = [message.clone() for message in self._messages(mail)]
            self.release()

    def _start_sockets(self) -> None:
        axis, peers = self._axis, others(self._axis)
        outgoing = self._sends if len(self._sends) > 1 else [self._sends[0]] * len(peers)
        self._received = [torch.empty_like(x) for x in self._receives] if self._peek else list(self._receives)
        works = [
            dist.irecv(x, group=axis.group, group_src=k, tag=self._label.tag)
            for k, x in zip(peers, self._received, strict=True)
        ]
        works += [
            dist.isend(x, group=axis.group, group_dst=k, tag=self._label.tag)
            for k, x in zip(peers, outgoing, strict=True)
        ]
        self._works = [work for work in works if work is not None]

    def _read(self, mail: Mail) -> list[Tensor]:
        axis = self._axis
        mail.rounds.remove(self)  # from here on nobody else takes them in
        if self._taken is None:
            self._letters = [mail.wait_for(axis.ranks[k], axis.name, self._label) for k in others(axis)]
        messages = self._taken or self._messages(mail)
        if self._peek:
            return messages
        for target, message in zip(self._receives, messages, strict=True):
            target.copy_(message)
        self.release()
        return list(self._receives)

    def _messages(self, mail: Mail) -> list[Tensor]:
        """The messages in `_letters`, where they lie."""
        axis, messages = self._axis, []
        for k, letter, like in zip(others(axis), self._letters, self._receives, strict=True):
            index = (axis.rank - k) % axis.size - 1 if len(self._sends) > 1 else 0  # among k's others
            messages.append(mail.look(letter, index * self._room, like))
        return messages
