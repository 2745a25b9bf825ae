"""Make NCCL's communicators, and connect them before a step needs them.

NCCL connects two ranks in the first operation that needs it: their hosts wait for each other, and memory is allocated,
which may wait for all work queued on the device. Within a step this could be a deadlock: other ranks may wait for work
that this host has not queued yet. So every communicator is used once while nothing else is under way.
"""

from __future__ import annotations  # a build without CUDA has no ProcessGroupNCCL

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta

import torch
import torch.distributed as dist

from megazero.comm.axes import FEW_CTAS


def split_group(
    split_ranks: Sequence[Sequence[int]], timeout: timedelta, name: str, *, few_ctas: bool = False
) -> dist.ProcessGroup | None:
    """Split communicators off that of the world, one for each list of ranks; every rank of the world calls it.

    Args:
        split_ranks: disjoint lists of global ranks.
        timeout: after which an operation of the group fails.
        name: of this rank's communicator in the flight recorder. It begins with an axis of the status slot
            (`axes.LANES`); the monitor ignores others.
        few_ctas: see `options`.

    Returns:
        The group of this rank; None if it is in no list.
    """
    given = options(timeout, few_ctas=few_ctas)
    lists = [list(ranks) for ranks in split_ranks]
    return dist.split_group(split_ranks=lists, timeout=timeout, pg_options=given, group_desc=name)


def options(timeout: timedelta, *, few_ctas: bool = False) -> dist.ProcessGroupNCCL.Options:
    """Return the options of one communicator; use them only once.

    Its stream has a high priority: its kernels, when ready, start before those of the computation.

    Args:
        few_ctas: use at most `FEW_CTAS` multiprocessors and buffers for as many: for small or overlapped messages.
    """
    found = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    found._timeout = timeout
    if few_ctas and hasattr(found.config, "max_ctas"):  # not in every build
        found.config.min_ctas, found.config.max_ctas = 1, FEW_CTAS
    return found


def connect(
    group: dist.ProcessGroup, device: torch.device, shown: Callable[[str], AbstractContextManager[None]]
) -> None:
    """Run each kind of collective of a step once along a group; every rank of the group calls it.

    Args:
        shown: returns a context that shows to other processes the kind of operation in which this rank waits.
    """
    x = torch.zeros(1, device=device)
    parts = [torch.zeros_like(x) for _ in range(group.size())]
    uses: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(x, group=group),
        "all_gather": lambda: dist.all_gather(parts, x, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter(x, parts, group=group),
    }
    for kind, use in uses.items():
        with shown(kind):
            use()
            synchronize(device)


def synchronize(device: torch.device) -> None:
    """Wait for all that a GPU has queued; on a CPU there is nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
