"""Gather the values of a module's units, free them, lend them to the user, and track which are gathered.

The values of a unit are in one of three states:

    resting    in shards, or whole in stages that do not shard parameters
    gathered   whole while a call of its part or a backward needs them
    lent       gathered for the user to look at and change; the module cannot be called in the meantime

An update, a load or a change by the user begins a new epoch: a graph of an earlier epoch is stale.

Ranks are in lockstep: they gather the same parts in the same order, and make the same calls of `Sharded`. Each rank
keeps a checksum of the parts that it has gathered, in their order. Before a call of `Sharded` it sends three numbers to
the others, and the host waits for theirs: the call, that checksum, and one of the parameters that are frozen.
"""

import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from megazero.base.errors import UserError
from megazero.comm.collectives import all_gather
from megazero.comm.grid import Axis
from megazero.comm.transport.exchange import CollectiveError
from megazero.library.parts import Part
from megazero.zero.gather import Gather
from megazero.zero.placement import UnitAxes
from megazero.zero.unit import Unit

CALLS: str = "backward step gathered gradients full_state_dict load_state_dict save load averaged"


def _other_parts(rank: int, than: int) -> UserError:
    """Return the error that says that `rank` ran other units of the module than rank `than`."""
    do = "call the same units in the same order, and equally many backwards, on all ranks; inside a unit, and in "
    do += "stages 0 to 2, calls may differ"
    return UserError(507, f"it ran other units of the module than rank {than}", do, rank=rank)


@contextmanager
def in_lockstep(own: int) -> Iterator[None]:
    """Replace the error of a collective, if it names a rank, by one that says that ranks have called different parts.

    Args:
        own: this rank.

    Raises:
        UserError: 507.
    """
    try:
        yield
    except CollectiveError as error:
        if error.rank is None:
            raise
        raise _other_parts(max(own, error.rank), min(own, error.rank)) from None


@dataclass
class Process:
    """The sharded modules of a process, or of a thread that is a rank: they may be in one graph, and in one backward.

    Attributes:
        modules: the number of modules so far.
        order: a checksum of the parts that have been gathered, in their order.
        in_backward: whether a backward of some of them runs.
        passed: called when that backward ends, for modules that it only passed through and whose gradients it drops.
    """

    modules: int = 0
    order: int = 0
    in_backward: bool = False
    passed: list[Callable[[], object]] = field(default_factory=list)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Mark that a backward runs in this context."""
        self.in_backward = True
        try:
            yield
        finally:
            self.in_backward = False
            for leave in self.passed:
                leave()
            self.passed.clear()


class Values:
    """The values of all units of a module.

    Args:
        parts: the parts of the module, the root first.
        process: this module and the others of the process.
        rank: this rank among all.

    Attributes:
        gather: gathers units.
        epoch: the number of times that the values have changed.
        lent: the names of the parameters that are lent; None: nothing is lent.
        storages: the sharded units that are gathered, by the storage of their values.
        called: the part that was called last in this forward; or None.
        ended: the part whose call ended last in this forward: its backward comes first.
    """

    def __init__(self, parts: Sequence[Part], process: Process, rank: int, device: torch.device):
        self.parts, self.process, self.rank, self.device = parts, process, rank, device
        self.gather = Gather(device)
        process.modules += 1
        self._number, self.epoch = process.modules, 0
        self.lent: Collection[str] | None = None
        self.storages: dict[int, Unit] = {}
        self.called: Part | None = None
        self.ended: Part | None = None
        self._members = [member for part in parts for member in part.members]
        self._versions = self._versions_now()

    @property
    def units(self) -> list[Unit]:
        """Return the units of all parts."""
        return [unit for part in self.parts for unit in part.units]

    def begin(self, part: Part, *, forward: bool) -> None:
        """Gather a part that is about to run; in a forward, prefetch the part that ran after it last time."""
        if not part.sharded:
            return
        self.unshard(part)
        if forward:
            if self.called is not None:
                self.called.after = part
            if part.after is not None and part.after is not part:
                self.prefetch(part.after)
        self.called = part

    def end(self, part: Part, *, graph: bool, keeps: bool) -> None:
        """Release a part that has run in a forward.

        Args:
            graph: whether a backward may follow; the root then stays gathered until the backward ends.
            keeps: whether a part other than the root stays gathered, because it returned its own parameter.
        """
        if part.root:
            self.called = None
            if not graph:
                self.release(self.parts)
            return
        if graph:
            self.ended = part
        if not keeps:
            self.release([part])

    def unshard(self, part: Part) -> None:
        """Gather a part that is needed now. Every rank does so in the same order."""
        if not part.here:
            self.process.order = zlib.crc32(b"%d %d" % (self._number, part.number), self.process.order)
            self.gather.unshard(part.units)
        for unit in part.units:
            if unit.parameters.whole is not None:
                self.storages[unit.parameters.whole.untyped_storage()._cdata] = unit

    def prefetch(self, part: Part) -> None:
        """Start to gather a part that will be needed soon."""
        if not part.here:
            self.gather.prefetch(part.units)

    def release(self, parts: Sequence[Part]) -> None:
        """Free the gathered values of some parts, except those that are running."""
        for part in parts:
            if part.sharded and not part.running:
                self.release_units(part.units)

    def release_units(self, units: list[Unit]) -> None:
        """Free the gathered values of some units."""
        for unit in units:
            if unit.parameters.whole is not None and not unit.parameters.rest_whole:
                self.storages.pop(unit.parameters.whole.untyped_storage()._cdata, None)
        self.gather.reshard(units)

    def release_all(self) -> None:
        """Free all gathered values, and cancel prefetches: parameters are about to change."""
        self.gather.reshard_all(self.units)
        self.storages.clear()
        self.called = self.ended = None

    @contextmanager
    def lend(self, units: list[Unit], names: Collection[str]) -> Iterator[None]:
        """Gather units in a context, in which the user may change the parameters that have these names."""
        self.release_all()
        self.gather.unshard(units)
        self.lent = names
        try:
            with torch.no_grad():
                yield
        finally:
            self.lent = None
            self.release_all()

    def begin_epoch(self) -> None:
        """Begin a new epoch after the values have changed: earlier graphs become stale."""
        self.epoch += 1
        self.expect_no_backward()

    def expect_no_backward(self) -> None:
        """Forget the calls whose backward is still to come."""
        for part in self.parts:
            part.open.clear()

    def require_unchanged(self, lent: Collection[str] = ()) -> None:
        """Refuse in-place changes made to parameters since the last check, for example through a view.

        Args:
            lent: the names of the parameters whose change is allowed.

        Raises:
            UserError: 502.
        """
        before, self._versions = self._versions, self._versions_now()
        for member, then, now in zip(self._members, before, self._versions, strict=True):
            if now != then and member.name not in lent:
                what = f"{member.name} was changed in place outside of `sharded.gathered`"
                raise UserError(502, what, "load a checkpoint; change values within `with sharded.gathered(...)`")

    def meet(self, axes: UnitAxes, call: str) -> None:
        """Wait until all ranks have reached a call, one of `CALLS`; replicas wait for each other only at a step.

        Args:
            axes: the axes of the module's units.

        Raises:
            UserError: 507, another rank has made another call, or run other parts; 502, it has frozen other parameters,
                or parameters were changed.
        """
        self.require_unchanged()
        self._compare(axes.shard, call, self.process.order)
        if call == "step":
            self._compare(axes.replica, call, 0)

    def _compare(self, axis: Axis, call: str, order: int) -> None:
        if axis.size == 1:
            return
        with torch._C.DisableTorchFunctionSubclass():
            asking = bytes(member.parameter.requires_grad for member in self._members)
        calls = CALLS.split()
        mine = [calls.index(call), order, zlib.crc32(asking)]
        with in_lockstep(self.rank):
            first, *others = all_gather(torch.tensor([mine], device=self.device), axis, "agree").tolist()
        odd = [(rank, own) for rank, own in zip(axis.ranks[1:], others, strict=True) if own != first]
        if not odd:
            return
        self.process.order = 0  # later comparisons start equal on all ranks
        rank, (theirs, parts, _) = min(odd, key=lambda one: [a == b for a, b in zip(one[1], first, strict=True)])
        if theirs != first[0]:
            what = f"it waits in sharded.{calls[theirs]}, and rank {axis.ranks[0]} in sharded.{calls[first[0]]}"
            do = "make the same calls on every rank, and as many backwards before each step"
            raise UserError(507, what, do, rank=rank)
        if parts != first[1]:
            raise _other_parts(rank, axis.ranks[0])
        what = f"it has frozen other parameters than rank {axis.ranks[0]}"
        raise UserError(502, what, "call requires_grad_ alike on every rank", rank=rank)

    def _versions_now(self) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():
            return [member.parameter._version for member in self._members]
