"""A grid of two ranks of which one is here: what it sends comes back to it through a communicator of NCCL.

NCCL refuses two ranks on one GPU. So the communicator has one rank, and an operation between two is one of its own
(`EchoGroup`). What that shows: NCCL's streams, events and launches next to the computation, the host's time for them,
the monitor's queue, and what the exchange takes of the device's memory bandwidth. What it does not show: links, other
ranks, sums. On a CPU the group copies.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from megazero.comm.collectives import nccl_gather, nccl_scatter
from megazero.comm.context import BUCKET
from megazero.comm.fake_group import FakeProcessGroup, alone
from megazero.comm.grid import Grid
from megazero.comm.ledger import Ledger
from megazero.comm.nccl import options
from megazero.comm.pool import same_place
from megazero.comm.status_board import StatusBoard
from scripts.gpu_check.findings import Asked

TIMEOUT = timedelta(seconds=60)


class EchoGroup(FakeProcessGroup):
    """A process group of rank 0 of two, which gets its own part in place of the other rank's.

    What a rank does is done: an operation each, with its stream and its end, that moves within the device as many bytes
    as would come from the other rank. A sum is this rank's summand alone. So numbers are finite, and of no real model.

    Args:
        inner: a group of this process alone, whose operations do the moving; None: copies on the current stream.
    """

    def __init__(self, inner: dist.ProcessGroup | None = None):
        super().__init__(0, 2)
        self._inner = inner

    def allreduce(self, tensors: Sequence[Tensor], *options: Any) -> dist.Work:
        if self._inner is None:
            return super().allreduce(tensors)
        return _under_way(dist.all_reduce(tensors[0], group=self._inner, async_op=True))

    def all_gather_single(self, whole: Tensor, part: Tensor, *options: Any) -> dist.Work:
        own, other = part.view(-1), whole.view(2, -1)[1]
        if self._inner is not None:
            return _under_way(nccl_gather(other, own, group=self._inner, async_op=True))
        other.copy_(own)
        return super().all_gather_single(whole, part)

    def reduce_scatter_single(self, out: Tensor, x: Tensor, *options: Any) -> dist.Work:
        own, result = x.view(2, -1)[0], out.view(-1)
        if self._inner is not None:
            return _under_way(nccl_scatter(result, own, group=self._inner, async_op=True))
        if not same_place(result, own):
            result.copy_(own)
        return super().reduce_scatter_single(out, x)

    def all_to_all_single(self, out: Tensor, x: Tensor, *options: Any) -> dist.Work:
        out.copy_(x)
        return super().all_to_all_single(out, x)

    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def recv(self, tensors: Sequence[Tensor], *source: Any) -> dist.Work:
        for x in tensors:
            x.zero_()
        return super().recv(tensors)


def _under_way(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this process is in the group"
    return work


@contextmanager
def one_rank_group(asked: Asked) -> Iterator[dist.ProcessGroup | None]:
    """Make a process group of NCCL with this process alone; None on a CPU."""
    if not asked.on_gpu:
        yield None
        return
    given, device = options(TIMEOUT), asked.device
    dist.init_process_group(
        "nccl", store=HashStore(), rank=0, world_size=1, timeout=TIMEOUT, device_id=device, pg_options=given
    )
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def echoing(inner: dist.ProcessGroup | None, *, tensor: int = 1, pipeline: int = 1) -> Grid:
    """Return the grid of rank 0 of two, along the data axis unless another is given."""
    sizes = {"tensor": tensor, "pipeline": pipeline}
    grid = alone(0, 2, backend="nccl", bucket=BUCKET, ledger=Ledger(), **sizes)
    groups = {axis.name: EchoGroup(inner) for axis in grid.values() if axis.size > 1}
    slot = StatusBoard().status_slot(0)
    echoes = replace(grid.comm, status_slot=slot, split_group=lambda **_: EchoGroup(inner))
    return grid.with_groups(groups).with_comm(echoes)
