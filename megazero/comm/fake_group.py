"""Simulate one rank of a grid of any size, without any other rank.

Every operation completes at once, and received values are undefined. The rank itself runs the code of a real run:
pieces, staging, sums, the ledger. So a single process can count the traffic and the memory of one rank of thousands.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.comm.context import CommContext
from megazero.comm.grid import Grid, lay_out
from megazero.comm.ledger import Ledger
from megazero.comm.transport.shared_memory import SLOT_BYTES, Label, Message, Outbox, SharedMemoryTransport, view_of


def alone(
    rank: int,
    world: int,
    *,
    tensor: int,
    pipeline: int,
    backend: str,
    bucket: int,
    ledger: Ledger,
    shard_ranks: int | None = None,
) -> Grid:
    """Return the grid of one rank, without processes for the other ranks.

    Args:
        backend: "nccl", or "gloo" between ranks of one host.
        bucket: most bytes of one operation, see `CommContext`.

    Raises:
        UserError: 106, see `sizes.shards_and_replicas`.
    """
    shared_memory = FakeSharedMemory(world) if backend == "gloo" and world > 1 else None
    comm = CommContext(
        backend,
        bucket=bucket,
        ledger=ledger,
        shared_memory=shared_memory,
        split_group=lambda **_: FakeProcessGroup(0, 2),
    )
    if shared_memory is not None:
        ledger.hold("staging", Outbox.size(world))
    grid = lay_out(rank, world, tensor=tensor, pipeline=pipeline, shard_ranks=shard_ranks, comm=comm)
    return grid.with_groups({axis.name: FakeProcessGroup(axis.rank, axis.size) for axis in grid.values()})


class _Done(dist.Work):
    """A completed operation. It keeps its tensors until it is waited for, as NCCL's does."""

    def __init__(self, *given: Any):
        super().__init__()
        self._given = given

    def wait(self, *timeout: Any) -> bool:
        self._given = ()
        return True

    def is_completed(self) -> bool:
        return True


class FakeProcessGroup(dist.ProcessGroup):
    """A process group of one process: the methods that torch's operations call complete at once."""

    def __init__(self, rank: int, size: int):
        super().__init__(rank, size)  # type: ignore[call-arg]

    def allreduce(self, *given: Any) -> dist.Work:
        """Leave all tensors as they are: other ranks have no values."""
        return _Done(*given)

    all_gather_single = reduce_scatter_single = all_to_all_single = send = recv = allreduce  # type: ignore[assignment]
    # The names before torch 2.13.
    _allgather_base = _reduce_scatter_base = alltoall_base = allreduce  # type: ignore[assignment]


class Idle(Executor):
    """An executor that completes each call at once without making it.

    There are no numbers to compute, and the memory that threads allocate is not part of a step.
    """

    def submit(self, fn: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        """Return a completed future; `fn` is not called."""
        future: Future[Any] = Future()
        future.set_result(None)
        return future


class FakeSharedMemory(SharedMemoryTransport):
    """Shared memory without readers or senders: every message counts as read at once, and as received at once."""

    def __init__(self, world: int):
        self.rounds, self.expected = [], {}
        self.reached = frozenset(range(world))
        self._slot = torch.empty(SLOT_BYTES, dtype=torch.uint8)

    def post(self, axis: str, label: Label, messages: Sequence[Tensor], room: int, readers: Sequence[int]) -> None:
        """Drop the messages."""

    def wait_for(self, sender: int, axis: str, label: Label) -> Message:
        """Return a message at once."""
        return Message(sender, 0, 0)

    def view(self, message: Message, start: int, like: Tensor) -> Tensor:
        """Return memory for a message, with undefined values."""
        return view_of(self._slot, start, like)

    def acknowledge(self, message: Message) -> None:
        """Do nothing: a message has no slot to free."""

    def send(self, target: int, key: int, message: Tensor) -> bool:
        """Send nothing."""
        return True

    def collect(self, sender: int) -> None:
        """Receive nothing."""

    def expect(self, sender: int, key: int, into: Tensor) -> None:
        """Expect nothing: `into` stays as it is."""

    def wait_until(self, ready: Callable[[], bool], sender: int) -> None:
        """Return at once; `ready()` must be True already."""
        assert ready(), "there is no other rank to wait for"
