"""Make NCCL's communicators, and connect them before a step needs them.

Two ranks are connected by the first operation that needs it: their hosts wait for each other, and memory is allocated,
which may wait for all that the device has queued. Within a step others may wait for what that host has not queued yet.
So every communicator is used once while nothing else is under way.
"""

from __future__ import annotations  # a build without CUDA has no options of NCCL

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
        split_ranks: lists of global ranks without a common one.
        name: of this rank's communicator in the flight recorder: its lane in the status slot.
        few_ctas: see `options`.

    Returns:
        The group of this rank; None where it is in no list.
    """
    given = options(timeout, few_ctas=few_ctas)
    lists = [list(ranks) for ranks in split_ranks]
    return dist.split_group(split_ranks=lists, timeout=timeout, pg_options=given, group_desc=name)


def options(timeout: timedelta, *, few_ctas: bool = False) -> dist.ProcessGroupNCCL.Options:
    """Return the options of one communicator, to be used once.

    Its stream has a high priority: a kernel of it that is ready starts before those of the computation.

    Args:
        few_ctas: for messages that are small or hidden: at most `FEW_CTAS` multiprocessors, and buffers for as many.
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
        shown: returns the context in which others can see that this rank waits in an operation of that kind.
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
