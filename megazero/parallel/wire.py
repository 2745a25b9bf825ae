"""What all collectives of one rank have in common: the backend, how long to wait, the ledger, the seat on the board."""

from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import Tensor

from megazero.parallel.board import Board, Seat
from megazero.parallel.ledger import Ledger
from megazero.parallel.shared import Mail

BUCKET = 64 << 20  # bytes


class Staging:
    """Memory that received messages pass through; kept, for its sizes come back every step."""

    def __init__(self, ledger: Ledger):
        self._ledger = ledger
        self._free: dict[int, list[Tensor]] = {}

    def take(self, size: int) -> Tensor:
        """uint8 [size] with anything in it."""
        if free := self._free.get(size):
            return free.pop()
        self._ledger.hold("staging", size)
        return torch.empty(size, dtype=torch.uint8)

    def give(self, tensor: Tensor) -> None:
        self._free.setdefault(len(tensor), []).append(tensor)


@dataclass(frozen=True, eq=False)
class Wire:
    """How a rank talks to others.

    Attributes:
        backend: "gloo" or "nccl"; algorithms are picked by it, never by where a tensor happens to lie.
        timeout: how long to wait for the others in one operation.
        bucket: most bytes of one operation that may lie between sender and receiver; longer ones go in pieces.
        ledger: what was sent, and the memory it took.
        mail: shared memory with ranks of the same host, where there is any.
        seat: where this rank shows which operation it is in.
        staging: for what comes through sockets.
    """

    backend: str = "gloo"
    timeout: timedelta = timedelta(seconds=120)
    bucket: int = BUCKET
    ledger: Ledger = field(default_factory=Ledger)
    mail: Mail | None = None
    seat: Seat = field(default_factory=lambda: Board.private().seat(0))
    staging: Staging = field(init=False)
    _rounds: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        object.__setattr__(self, "staging", Staging(self.ledger))

    def reserve(self, axis: str, rounds: int) -> int:
        """The number of the first of the next `rounds` rounds of messages on an axis: the same on all its ranks."""
        first = self._rounds[axis]
        self._rounds[axis] += rounds
        return first
