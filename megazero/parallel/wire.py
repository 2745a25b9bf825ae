"""What all collectives of one rank have in common: the backend, how long to wait, the ledger, the seat on the board."""

from dataclasses import dataclass, field
from datetime import timedelta

from megazero.parallel.board import Board, Seat
from megazero.parallel.ledger import Ledger
from megazero.parallel.shared import Mail


@dataclass(frozen=True, eq=False)
class Wire:
    """How a rank talks to others.

    Attributes:
        backend: "gloo" or "nccl"; algorithms are picked by it, never by where a tensor happens to lie.
        timeout: how long to wait for the others in one operation.
        ledger: what was sent.
        mail: shared memory with ranks of the same host, where there is any.
        seat: where this rank shows which operation it is in.
    """

    backend: str = "gloo"
    timeout: timedelta = timedelta(seconds=120)
    ledger: Ledger = field(default_factory=Ledger)
    mail: Mail | None = None
    seat: Seat = field(default_factory=lambda: Board.private().seat(0))
