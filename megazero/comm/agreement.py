"""Run an action that may fail on some ranks, and let all ranks know of a failure before any rank acts on it.

If one rank raises while the others go on, they wait in their next operation. So any action that may fail on some ranks
only (files, packages, disks) runs inside `agree`: every rank learns the outcome on all ranks, and either all return
their result or all raise; the lowest rank that failed reports the reason.
"""

from collections.abc import Callable
from typing import TypeVar

import torch

from megazero.base.errors import FailedElsewhere, UserError, of_system
from megazero.comm.collectives import all_gather
from megazero.comm.grid import Axis

T = TypeVar("T")
_SLICE = 1.0  # seconds


def agree(world: Axis, device: torch.device, action: Callable[[], T]) -> T:
    """Run `action()` on every rank; return its result if it succeeded on all.

    Raises:
        UserError: the error of this rank, if no lower rank has failed.
        FailedElsewhere: another rank is the lowest that failed.
    """
    own: UserError | None = None
    result: T | None = None
    try:
        result = action()
    except UserError as error:
        own = error
    except OSError as error:
        own = of_system(error)
    mine = torch.tensor([own.code if own else 0], dtype=torch.int64, device=device)
    codes = all_gather(mine, world, "agree").tolist()
    first = next((rank for rank, code in enumerate(codes) if code), None)
    if first is None:
        return result  # type: ignore[return-value]
    if first == world.rank and own is not None:
        raise own
    raise FailedElsewhere(first, codes[first])


def until_all(world: Axis, device: torch.device, ready: Callable[[float], bool]) -> None:
    """Wait until `ready` is true on all ranks, however long the slowest one takes.

    Ranks exchange their answers every second, so that no operation lasts as long as the work of another rank's disk.

    Args:
        ready: waits at most the given number of seconds, and returns whether this rank is ready.
    """
    while True:
        own = torch.tensor([ready(_SLICE)], dtype=torch.int64, device=device)
        if all_gather(own, world, "agree").all():
            return
