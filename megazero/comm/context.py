"""Hold the resources that all collectives of one rank share: backend, timeout, ledger, status slot ..."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist

from megazero.comm.ledger import Ledger
from megazero.comm.nccl import split_group
from megazero.comm.pool import Pool
from megazero.comm.status_board import StatusBoard, StatusSlot
from megazero.comm.transport.shared_memory import SharedMemoryTransport

BUCKET = 64 << 20  # bytes


@dataclass(frozen=True, eq=False)
class CommContext:
    """The communication settings and resources of one rank.

    Attributes:
        backend: "gloo" or "nccl"; the choice of algorithms depends on it, never on the device of a tensor.
        timeout: how long one operation waits for the other ranks; on NCCL it is the timeout of the process groups,
            which then abort the process.
        bucket: most bytes of one operation between sender and receiver; longer messages are sent in pieces.
        ledger: counts traffic and memory.
        shared_memory: the transport between ranks of the same host; None: sockets are used.
        status_slot: shows the operation that this rank is in.
        first_uses: first uses of NCCL communicators that this rank is in, for the monitor (`launcher/monitor.py`).
        split_group: makes communicators of subsets of the ranks (`nccl.py`); all ranks of the world call it.
        host_staging: host memory through which device tensors are sent if the backend sends only from there
            (`transport/host_staging.py`); None: they are sent directly.
        together: returns the context of a named action of all ranks in start-up (`launcher/rendezvous.py`). The default
            is for one rank, which has no other rank to wait for.
    """

    backend: str = "gloo"
    timeout: timedelta = timedelta(seconds=120)
    bucket: int = BUCKET
    ledger: Ledger = field(default_factory=Ledger)
    shared_memory: SharedMemoryTransport | None = None
    status_slot: StatusSlot = field(default_factory=lambda: StatusBoard().status_slot(0))
    first_uses: list[str] = field(default_factory=list)
    split_group: Callable[..., dist.ProcessGroup | None] = split_group
    host_staging: Pool | None = None
    together: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext()
    _rounds: Counter[str] = field(default_factory=Counter)

    @cached_property
    def staging(self) -> Pool:
        """Return the buffers for messages received through sockets."""
        return Pool(torch.uint8, torch.device("cpu"), self.ledger, "staging")

    def reserve(self, axis: str, rounds: int) -> int:
        """Reserve `rounds` message numbers on an axis; return the first, which is equal on all ranks of the axis."""
        first = self._rounds[axis]
        self._rounds[axis] += rounds
        return first

    def split(
        self, name: str, lines: Sequence[Sequence[int]], world: int, *, few_ctas: bool = False
    ) -> dist.ProcessGroup | None:
        """Split communicators off the world's, one for each list of ranks, and return this rank's; see `split_group`.

        The host waits for all `world` ranks meanwhile, so the status board shows the call.
        """
        with self.calling("world", "world", range(world), "split"):
            return self.split_group(split_ranks=lines, timeout=self.timeout, name=name, few_ctas=few_ctas)

    @contextmanager
    def calling(self, communicator: str, lane: str, ranks: range, what: str) -> Iterator[None]:
        """Show in the status slot, inside the `with`, that this rank uses an NCCL communicator for the first time.

        In such a first use the host itself may wait for other ranks.

        Args:
            communicator, what: the names of the communicator and of the operation, for the text.
            lane: the row of the status slot, an axis or `P2P`.
            ranks: the ranks that the host may wait for.
        """
        text = f"first {what} of {communicator}"
        self.status_slot.begin(lane, ranks, text)
        self.first_uses.append(text)
        try:
            yield
        finally:
            self.first_uses.remove(text)
        self.status_slot.end(lane)
