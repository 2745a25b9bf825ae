"""Hold what all collectives of one rank share: the backend, the timeout, the ledger, the status slot."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from megazero.comm.ledger import Ledger
from megazero.comm.lobby import Lobby
from megazero.comm.pool import Pool
from megazero.comm.status_board import StatusBoard, StatusSlot
from megazero.comm.transport.shared_memory import SharedMemoryTransport

BUCKET = 64 << 20  # bytes


@dataclass(frozen=True, eq=False)
class CommContext:
    """The communication settings and resources of one rank.

    Attributes:
        backend: "gloo" or "nccl"; algorithms are picked by it, never by the device of a tensor.
        timeout: how long to wait for the others in one operation.
        bucket: most bytes of one operation between sender and receiver; longer ones go in pieces.
        ledger: counts traffic and memory.
        shared_memory: the transport between ranks of the same host; None: sockets are used.
        status_slot: shows the operation that this rank is in.
        split_group: makes communicators of a few ranks each; all ranks of the world call it.
        host_staging: the host's memory that tensors of a device go through where the backend sends from there only
            (`transport/host_staging.py`); None: they are sent directly.
        lobby: the start-up of the ranks through the store; None: there is one rank.
        staging: buffers for messages received through sockets.
    """

    backend: str = "gloo"
    timeout: timedelta = timedelta(seconds=120)
    bucket: int = BUCKET
    ledger: Ledger = field(default_factory=Ledger)
    shared_memory: SharedMemoryTransport | None = None
    status_slot: StatusSlot = field(default_factory=lambda: StatusBoard.private().status_slot(0))
    split_group: Callable[..., dist.ProcessGroup | None] = dist.split_group
    host_staging: Pool | None = None
    lobby: Lobby | None = None
    staging: Pool = field(init=False)
    _rounds: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        staging = Pool(torch.uint8, torch.device("cpu"), self.ledger, "staging")
        object.__setattr__(self, "staging", staging)

    def reserve(self, axis: str, rounds: int) -> int:
        """Reserve `rounds` rounds of messages on an axis; return the number of the first, the same on all its ranks."""
        first = self._rounds[axis]
        self._rounds[axis] += rounds
        return first
