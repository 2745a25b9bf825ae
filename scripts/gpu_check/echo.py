"""A grid of two ranks of which one is here: what it sends comes back to it through a communicator of NCCL.

NCCL refuses two ranks on one GPU. So the communicator has one rank, and an operation between two is one of its own
(`EchoGroup`). What that shows: NCCL's streams, events and launches beside the computation, the host's time for them,
the monitor's queue, and what the exchange takes of the device's memory bandwidth. What it does not show: links, other
ranks, sums. On a CPU the group copies.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from megazero.comm.context import BUCKET
from megazero.comm.device_queue import DeviceQueue
from megazero.comm.fake_group import EchoGroup, alone
from megazero.comm.grid import Grid
from megazero.comm.ledger import Ledger
from megazero.comm.nccl import options
from megazero.comm.status_board import StatusBoard
from scripts.gpu_check.findings import Asked

TIMEOUT = timedelta(seconds=60)


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
    shown = {"status_slot": StatusBoard.private().status_slot(0), "device_queue": DeviceQueue()}
    echoes = replace(grid.comm, **shown, split_group=lambda **_: EchoGroup(inner))
    return grid.with_groups(groups).with_comm(echoes)
