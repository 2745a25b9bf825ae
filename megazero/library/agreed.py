"""Let each rank call the units that it likes: before anything is gathered or summed, the ranks agree on what is next.

Where parameters rest in shards, a rank that needs a unit needs all the others, who may be somewhere else in the module,
or through with it. So each says what it waits for, a number, before it goes on:

    a unit            whole parameters, now
    a sum of a unit   its gradients are complete here, and of all units that are summed before it
    a meeting         the call of `Sharded` that it is in: it calls no unit any more until all have come

Where any rank waits for a unit, the first such unit in the order of the module is next: all gather it, and who had not
asked for it frees it again. So each round lets at least one rank go on. A sum or a meeting is next when all ranks wait
for it: those who came first have served the others until then. What rests is changed only behind a meeting, so
whatever a rank gathers has the same values at any time.

Every rank takes part in every round, in the same order, whatever it calls; nothing can be mistaken or wait for ever
unless the ranks wait for different meetings, and then all know.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from megazero.base.errors import UserError
from megazero.comm.collectives import all_gather
from megazero.comm.transport.exchange import MismatchError
from megazero.zero.gather import Gather
from megazero.zero.unit import Unit

MEETINGS = ("backward", "step", "gathered", "gradients", "full_state_dict", "load_state_dict", "save", "load")


def other_parts(rank: int, than: int) -> UserError:
    """Return the error for ranks in lockstep that have called different units."""
    do = "let every rank call the same parts, or give shard(lockstep=False)"
    return UserError(507, f"it has run other parts of the module than rank {than}", do, rank=rank)


@contextmanager
def in_lockstep(own: int) -> Iterator[None]:
    """Tell it where the messages of another rank show that it has called other units.

    Args:
        own: this rank.

    Raises:
        UserError: 507.
    """
    try:
        yield
    except MismatchError as error:
        raise other_parts(max(own, error.rank), min(own, error.rank)) from None


class AgreedGather(Gather):
    """The gathering of units by ranks that need different ones.

    The host of each rank waits for the others before each gathering and each sum.

    Args:
        units: all of the module, in its order; they rest in shards over the same ranks.
    """

    def __init__(self, device: torch.device, units: Sequence[Unit]):
        super().__init__(device)
        self._device, self._units, self._axis = device, units, units[0].axes.shard
        self._numbers = {unit: number for number, unit in enumerate(units)}

    def prefetch(self, units: list[Unit]) -> None:
        """Gather nothing beforehand: nobody knows whether it will be needed."""

    def unshard(self, units: list[Unit]) -> None:
        """Gather units that are needed now, while the others may need other ones."""
        for unit in units:
            if unit.whole is None:
                self._reach(self._numbers[unit])
                super().prefetch([unit])
                super().unshard([unit])

    def before_sum(self, unit: Unit) -> None:
        """Wait until the gradients of a unit are complete on all ranks. Raises UserError 507, as `meet`."""
        self._reach(len(self._units) + self._numbers[unit])

    def meet(self, meeting: str) -> None:
        """Wait until all ranks have come to one of `MEETINGS`.

        Raises:
            UserError: 507, another rank waits for another one.
        """
        self._reach(2 * len(self._units) + MEETINGS.index(meeting))

    def _reach(self, mine: int) -> None:
        """Serve the others until it is the turn of what this rank waits for."""
        while True:
            wanted = all_gather(torch.tensor([mine], device=self._device), self._axis, "agree").tolist()
            first = min(wanted)
            if first < len(self._units):
                if first == mine:
                    return
                self._serve(self._units[first])
            elif first == max(wanted):
                return
            else:
                rank = next(rank for rank, number in enumerate(wanted) if number != wanted[0])
                what = f"it waits for {self._words(wanted[rank])}, and rank {self._axis.ranks[0]} for "
                what += self._words(wanted[0])
                raise UserError(507, what, "let every rank make the same calls", rank=self._axis.ranks[rank])

    def _serve(self, unit: Unit) -> None:
        """Take part in the gathering of a unit that others need."""
        with self._time(unit):
            with self._stream.queued():
                whole, pending = unit.start_unshard()
                pending.wait()
            self._stream.join()
        unit.discard(whole)

    def _words(self, number: int) -> str:
        """Return in words what a rank waits for that is no unit."""
        kind, of = divmod(number, len(self._units))
        return f"sharded.{MEETINGS[number - 2 * len(self._units)]}" if kind > 1 else f"a sum of {self._units[of].name}"
