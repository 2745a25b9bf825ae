"""Keep ranks in lockstep: they gather the same parts in the same order, and make the same calls of `Sharded`.

Each rank keeps a number made of the parts that it has gathered, in their order. Before a call of `Sharded` it sends
three numbers to the others, and the host waits for theirs: the call, what it has gathered, and what is frozen.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from zlib import crc32

import torch

from megazero.base.errors import UserError
from megazero.comm.collectives import all_gather
from megazero.comm.grid import Axis
from megazero.comm.transport.exchange import MismatchError
from megazero.library.values import Values
from megazero.zero.placement import UnitAxes

MEETINGS = (
    "backward",
    "step",
    "gathered",
    "gradients",
    "clip_gradients",
    "full_state_dict",
    "load_state_dict",
    "save",
    "load",
)


def _other_parts(rank: int, than: int) -> UserError:
    """Return the error for ranks in lockstep that have called different units."""
    do = "let every rank call the same parts and make as many backwards; inside of a part, and in stages 0 to 2, "
    do += "ranks may differ"
    return UserError(507, f"it has run other parts of the module than rank {than}", do, rank=rank)


@contextmanager
def in_lockstep(own: int) -> Iterator[None]:
    """Report the messages of another rank that show that it has called other units.

    Args:
        own: this rank.

    Raises:
        UserError: 507.
    """
    try:
        yield
    except MismatchError as error:
        raise _other_parts(max(own, error.rank), min(own, error.rank)) from None


def meet(values: Values, axes: UnitAxes, meeting: str) -> None:
    """Wait until all ranks have come to one of `MEETINGS`; groups of replicas come together to a step alone.

    Args:
        values: of the module that is called.
        axes: of its units.

    Raises:
        UserError: 507, another rank has made another call, or run other parts; 502, it has frozen others, or
            parameters were changed.
    """
    values.require_unchanged()
    _compare(values, axes.shard, meeting, values.process.order)
    if meeting == "step":
        _compare(values, axes.replica, meeting, 0)


def _compare(values: Values, axis: Axis, meeting: str, order: int) -> None:
    if axis.size == 1:
        return
    mine = [MEETINGS.index(meeting), order, crc32(bytes(values.trained_now()))]
    with in_lockstep(values.rank):
        first, *others = all_gather(torch.tensor([mine], device=values.device), axis, "agree").tolist()
    odd = [(rank, own) for rank, own in zip(axis.ranks[1:], others, strict=True) if own != first]
    if not odd:
        return
    values.process.order = 0  # the messages that follow begin alike
    rank, (call, parts, _) = min(odd, key=lambda one: [a == b for a, b in zip(one[1], first, strict=True)])
    if call != first[0]:
        what = f"it waits for sharded.{MEETINGS[call]}, and rank {axis.ranks[0]} for sharded.{MEETINGS[first[0]]}"
        do = "let every rank make the same calls, and as many backwards before each step"
        raise UserError(507, what, do, rank=rank)
    if parts != first[1]:
        raise _other_parts(rank, axis.ranks[0])
    what = f"it has frozen other parameters than rank {axis.ranks[0]}"
    raise UserError(502, what, "call requires_grad_ alike on every rank", rank=rank)
