"""Let the ranks know before a call of `Sharded` whether all make it, have frozen the same and run the same before."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from zlib import crc32

import torch

from megazero.base.errors import UserError
from megazero.comm.collectives import all_gather
from megazero.comm.grid import Axis
from megazero.comm.transport.exchange import MismatchError
from megazero.library.parameters import ShardedParameter
from megazero.library.process import Process
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


class Lockstep:
    """The calls of one `Sharded` that all ranks make together.

    Each rank sends three numbers to the others, for which the host waits: its call, what it has gathered, and what is
    frozen.

    Args:
        rank: this one.
        parameters: of the module.
    """

    def __init__(
        self,
        rank: int,
        axes: UnitAxes,
        parameters: Sequence[ShardedParameter],
        process: Process,
        device: torch.device,
    ):
        self.rank, self._axes, self._parameters = rank, axes, parameters
        self._process, self._device = process, device
        self._versions = self._versions_now()

    def require_unchanged(self, lent: Collection[str] = ()) -> None:
        """Refuse changes of parameters in place since the last time, through a view say.

        Args:
            lent: the names of those that may have been changed.

        Raises:
            UserError: 502.
        """
        before, self._versions = self._versions, self._versions_now()
        for parameter, then, now in zip(self._parameters, before, self._versions, strict=True):
            if now != then and parameter.full_name not in lent:
                what = f"{parameter.full_name} was changed in place outside of `sharded.gathered`"
                raise UserError(502, what, "load a checkpoint; change values within `with sharded.gathered(...)`")

    def meet(self, meeting: str) -> None:
        """Wait until all ranks have come to one of `MEETINGS`; groups of replicas come together to a step alone.

        Raises:
            UserError: 507, another rank has made another call, or run other parts; 502, it has frozen others, or
                parameters were changed.
        """
        self.require_unchanged()
        with torch._C.DisableTorchFunctionSubclass():
            frozen = crc32(bytes(parameter.requires_grad for parameter in self._parameters))
        self._compare(self._axes.shard, meeting, self._process.order, frozen)
        if meeting == "step":
            self._compare(self._axes.replica, meeting, 0, frozen)

    def _versions_now(self) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():
            return [parameter._version for parameter in self._parameters]

    def _compare(self, axis: Axis, meeting: str, order: int, frozen: int) -> None:
        if axis.size == 1:
            return
        mine = torch.tensor([[MEETINGS.index(meeting), order, frozen]], device=self._device)
        with in_lockstep(self.rank):
            calls, orders, froze = all_gather(mine, axis, "agree").T.tolist()
        if any(_odd(numbers) is not None for numbers in (calls, orders)):
            self._process.order = 0  # what follows begins alike
        if (at := _odd(calls)) is not None:
            own, first = MEETINGS[calls[at]], MEETINGS[calls[0]]
            what = f"it waits for sharded.{own}, and rank {axis.ranks[0]} for sharded.{first}"
            do = "let every rank make the same calls, and as many backwards before each step"
            raise UserError(507, what, do, rank=axis.ranks[at])
        if (at := _odd(orders)) is not None:
            raise _other_parts(axis.ranks[at], axis.ranks[0])
        if (at := _odd(froze)) is not None:
            what = f"it has frozen other parameters than rank {axis.ranks[0]}"
            raise UserError(502, what, "call requires_grad_ alike on every rank", rank=axis.ranks[at])


def _odd(numbers: list[int]) -> int | None:
    """Return the place of the first number that is another than the first; None: all are alike."""
    return next((at for at, number in enumerate(numbers) if number != numbers[0]), None)
