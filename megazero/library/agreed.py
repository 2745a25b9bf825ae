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
unless the ranks wait for different meetings, and then all know. Several modules of a process share the numbers: a rank
that waits for a unit of one is served by ranks that are in another.
"""

import weakref
from collections.abc import Sequence

import torch

from megazero.base.errors import UserError
from megazero.comm.collectives import all_gather
from megazero.library.process import Process
from megazero.zero.gather import Gather
from megazero.zero.unit import Unit

_MOST = 1 << 20  # units of a process
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


class AgreedGather(Gather):
    """The gathering of units by ranks that need different ones.

    The host of each rank waits for the others before each gathering and each sum.

    Args:
        units: all of the module, in its order; they rest in shards over the same ranks.
    """

    def __init__(self, device: torch.device, units: Sequence[Unit], process: Process):
        super().__init__(device)
        self._device, self._units, self._axis = device, process.units, units[0].axes.shard
        self._module = process.modules
        self._numbers = {unit: number for number, unit in enumerate(units, len(self._units))}
        self._units += map(weakref.ref, units)

    def prefetch(self, units: list[Unit]) -> None:
        """Gather nothing beforehand: nobody knows whether it will be needed."""

    def unshard(self, units: list[Unit]) -> None:
        """Gather units that are needed now, while the others may need other ones."""
        for unit in units:
            if unit.parameters.whole is None:
                self._reach(self._numbers[unit])
                super().prefetch([unit])
                super().unshard([unit])

    def replace(self, unit: Unit, new: Unit) -> None:
        """Let a unit have the number of another one, in whose place it is."""
        self._numbers[new] = self._numbers.pop(unit)
        self._units[self._numbers[new]] = weakref.ref(new)

    def before_sum(self, unit: Unit) -> None:
        """Wait until the gradients of a unit are complete on all ranks. Raises UserError 507, as `meet`."""
        self._reach(_MOST + self._numbers[unit])

    def meet(self, meeting: str) -> None:
        """Wait until all ranks have come to one of `MEETINGS`.

        Raises:
            UserError: 507, another rank waits for another one.
        """
        self._reach(2 * _MOST + len(MEETINGS) * self._module + MEETINGS.index(meeting))

    def _reach(self, mine: int) -> None:
        """Serve the others until it is the turn of what this rank waits for."""
        while True:
            wanted = all_gather(torch.tensor([mine], device=self._device), self._axis, "agree").tolist()
            first = min(wanted)
            if first < _MOST:
                if first == mine:
                    return
                self._serve(first)
            elif first == max(wanted):
                return
            else:
                rank = next(rank for rank, number in enumerate(wanted) if number != wanted[0])
                what = f"it waits for {self._words(wanted[rank])}, and rank {self._axis.ranks[0]} for "
                what += self._words(wanted[0])
                raise UserError(507, what, "let every rank make the same calls", rank=self._axis.ranks[rank])

    def _serve(self, number: int) -> None:
        """Take part in the gathering of a unit that others need."""
        unit = self._units[number]()
        assert unit is not None, "who calls its module on one rank has it on all"
        with self._time(unit):
            with self._stream.queued():
                whole, pending = unit.parameters.start_gather()
                pending.wait()
            self._stream.join()
        unit.parameters.discard(whole)

    def _words(self, number: int) -> str:
        """Return in words what a rank waits for that is no unit."""
        kind, of = divmod(number, _MOST)
        if kind == 2:
            return f"sharded.{MEETINGS[of % len(MEETINGS)]}"
        unit = self._units[of]()
        return "a sum" if unit is None else f"a sum of {unit.name}"
