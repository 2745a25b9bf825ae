"""A grid of two ranks with only one real rank: the data that it sends comes back to it through NCCL.

NCCL refuses two ranks on one GPU. So the communicator has one rank, which does the collectives of two ranks with itself
(`EchoGroup`). This covers NCCL's streams, events and launches next to the computation, their host time, the monitor's
queue, and the device memory bandwidth that communication takes. It does not cover links, other ranks, or sums. On a CPU
the group copies.
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
    """The process group of rank 0 of two; it receives its own data instead of the other rank's.

    Each collective is one operation on a stream, with a completion event. It moves as many bytes within the device as
    would come from the other rank. A sum is this rank's summand only, so numbers are finite but meaningless.

    Args:
        inner: a group of this process only, whose operations move the data; None: copies on the current stream.
    """

    def __init__(self, inner: dist.ProcessGroup | None = None):
        super().__init__(0, 2)
        self._inner = inner

    def allreduce(self, tensors: Sequence[Tensor], *options: Any) -> dist.Work:
        """All-reduce within this process: the values do not change."""
        if self._inner is None:
            return super().allreduce(tensors)
        return _under_way(dist.all_reduce(tensors[0], group=self._inner, async_op=True))

    def all_gather_single(self, whole: Tensor, part: Tensor, *options: Any) -> dist.Work:
        """Copy this rank's part into the other rank's place of `whole` too."""
        own, other = part.view(-1), whole.view(2, -1)[1]
        if self._inner is not None:
            return _under_way(nccl_gather(other, own, group=self._inner, async_op=True))
        other.copy_(own)
        return super().allreduce(whole, part)

    def reduce_scatter_single(self, out: Tensor, x: Tensor, *options: Any) -> dist.Work:
        """Copy this rank's half of `x` to `out`, without another rank's summand."""
        own, result = x.view(2, -1)[0], out.view(-1)
        if self._inner is not None:
            return _under_way(nccl_scatter(result, own, group=self._inner, async_op=True))
        if not same_place(result, own):
            result.copy_(own)
        return super().allreduce(out, x)

    def all_to_all_single(self, out: Tensor, x: Tensor, *options: Any) -> dist.Work:
        """Copy `x` to `out`."""
        out.copy_(x)
        return super().allreduce(out, x)

    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def recv(self, tensors: Sequence[Tensor], *source: Any) -> dist.Work:
        """Receive zeros."""
        for x in tensors:
            x.zero_()
        return super().allreduce(tensors)


def _under_way(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this process is in the group"
    return work


@contextmanager
def one_rank_group(asked: Asked) -> Iterator[dist.ProcessGroup | None]:
    """Make an NCCL process group of this process only; yield None on a CPU."""
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
    """Return the grid of rank 0 of two; the axis is data, unless `tensor` or `pipeline` is 2."""
    sizes = {"tensor": tensor, "pipeline": pipeline}
    grid = alone(0, 2, backend="nccl", bucket=BUCKET, ledger=Ledger(), **sizes)
    groups = {axis.name: EchoGroup(inner) for axis in grid.values() if axis.size > 1}
    slot = StatusBoard().status_slot(0)
    echoes = replace(grid.comm, status_slot=slot, split_group=lambda **_: EchoGroup(inner))
    return grid.with_groups(groups).with_comm(echoes)
