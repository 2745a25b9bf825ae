"""Move a module's parameters into the memory of units, with the initial values of rank 0.

A module may come with values, on any device, or without values, on torch's meta device. For each part in turn, rank 0
makes the missing values, with `initial` or the modules' own `reset_parameters`. Its values are sent to all ranks (by an
all-reduce to which the other ranks add zeros), each rank keeps its own shards, and the whole part is freed. So no rank
ever holds more than one part in addition to its own shards, and ranks need not draw the same random numbers.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from megazero.base.errors import UserError
from megazero.comm.agreement import agree
from megazero.comm.collectives import all_reduce
from megazero.comm.grid import Axis
from megazero.comm.pool import Pool
from megazero.kernels.operations import Operations
from megazero.kernels.select import choose
from megazero.library.optimizers import Recipe
from megazero.library.parts import Member, Part, Place, buffers_of
from megazero.library.tiers import Tiers
from megazero.zero.layout import UnitLayout, lay_out
from megazero.zero.placement import Precision, UnitAxes
from megazero.zero.resting import Resources
from megazero.zero.unit import Unit

Initial = Callable[[str, Tensor], object]
Shapes = Mapping[Place, torch.Size]  # of every parameter of the module


@dataclass(frozen=True)
class Memory:
    """How a module's units are stored: on which ranks and devices, in which buffers, with which kernels.

    Attributes:
        world: all ranks.
        kernels: as the option precision.kernels.
        initial: called as (name, tensor), fills a tensor that was on meta; None: `reset_parameters` of its module does.
        masters: bf16 parameters have masters in fp32; False: they are updated themselves.
        moments: the dtype of optimizer state; None: that of updates.
    """

    world: Axis
    axes: UnitAxes
    device: torch.device
    tiers: Tiers
    kernels: str
    initial: Initial | None
    masters: bool = True
    moments: torch.dtype | None = None
    _pools: dict[torch.dtype, Pool] = field(default_factory=dict)

    def ops(self, dtype: torch.dtype, *, updates: bool = False) -> Operations:
        """Return the kernels for a dtype on the device; for updates, on the host if the optimizer is offloaded."""
        on_host = updates and self.tiers.offload.optimizer is not None
        return choose(self.kernels, torch.device("cpu") if on_host else self.device, dtype)

    def pool(self, dtype: torch.dtype) -> Pool:
        """Return the buffer pool that all units share for whole parameters and whole gradients of a dtype."""
        return self._pools.setdefault(dtype, Pool(dtype, self.device, self.world.comm.ledger, "pool"))

    def unit(self, layout: UnitLayout, dtype: torch.dtype, *, trained: bool) -> Unit:
        """Return a new unit, filled with zeros."""
        gradients = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
        moments = None if dtype == torch.float64 else self.moments
        precision = Precision(dtype, gradients, None, self.masters or dtype != torch.bfloat16, moments)
        ops = self.ops(dtype if dtype.is_floating_point else torch.float32)
        resources = Resources(
            precision,
            self.device,
            self.pool(dtype),
            self.pool(precision.gradients),
            offload=self.tiers.offload,
            ops=ops,
            extensions=self.tiers.extensions(precision, ops),
        )
        return Unit(layout, self.axes, resources, trainable=trained)


def give_units(parts: Sequence[Part], dtype: torch.dtype | None, recipe: Recipe, memory: Memory) -> None:
    """Move the parameters of every part into units, with the values of rank 0.

    No rank ever holds more than its shards and one part.
    """
    shapes = {place: m.parameter.shape for part in parts for m in part.members for place in m.places}
    for part in parts:
        kinds: dict[tuple[torch.dtype, bool], list[Member]] = {}  # each becomes a unit
        for member in part.members:
            own, trained = member.parameter.dtype, member.parameter.requires_grad
            own = dtype if dtype is not None and own.is_floating_point else own
            kinds.setdefault((own, trained), []).append(member)
        agree(memory.world, memory.device, partial(make_values, part, memory, shapes))
        for (own, trained), members in kinds.items():
            several = len({one for one, _ in kinds}) > 1
            words = [str(own).removeprefix("torch.")] * several + ["frozen"] * (not trained)
            name = f"{part.name} ({', '.join(words)})" if words else part.name
            layout = lay_out(name, list(map(recipe.entry_of, members)), memory.tiers.alignment)
            adopt(memory.unit(layout, own, trained=trained), members, memory.world)
        part.members = [member for members in kinds.values() for member in members]
        part.find_units()


def make_values(part: Part, memory: Memory, shapes: Shapes) -> None:
    """On rank 0 replace a part's parameters on meta, in its modules, by parameters with initial values.

    `reset_parameters` may fill buffers too: those on meta first become NaN (0 if not floating point) on the device.

    Args:
        shapes: of all parameters; `reset_parameters` sees zeros of this shape for a parameter of another unit.

    Raises:
        UserError: 509, a module has no `reset_parameters`.
    """
    without = [member for member in part.members if member.parameter.is_meta]
    initial, device = memory.initial, memory.device
    if not without or memory.world.rank > 0:  # values of other ranks are not read
        return
    owners = dict.fromkeys(place.owner for member in without for place in member.places)
    if initial is None and (odd := next((one for one in owners if not hasattr(one, "reset_parameters")), None)):
        name = next(member.name for member in without if any(place.owner is odd for place in member.places))
        what = f"{name} is on the meta device, and {type(odd).__name__} has no reset_parameters"
        raise UserError(509, what, "give shard(initial=...), which fills a tensor by its name")
    for member in without:
        values = torch.empty_like(member.parameter, device=device)
        made = nn.Parameter(values, requires_grad=member.parameter.requires_grad)
        for place in member.places:
            place.owner._parameters[place.attribute] = made
        if initial is not None:
            with torch.no_grad():
                initial(member.name, values)
    for owner in owners if initial is None else ():
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_meta:
                fill = math.nan if buffer.is_floating_point() else 0
                owner._buffers[name] = torch.full_like(buffer, fill, device=device)
        with _stand_ins(owner, shapes, device):
            owner.reset_parameters()  # pyright: ignore[reportCallIssue] - checked above


@contextmanager
def _stand_ins(owner: nn.Module, shapes: Shapes, device: torch.device) -> Iterator[None]:
    """While a module resets its parameters, show it zeros of full shape for parameters of another part's unit."""
    taken = {name: p for name, p in owner._parameters.items() if p is not None and hasattr(p, "gradient_slot")}
    for name, parameter in taken.items():
        values = torch.zeros(shapes[Place(owner, name)], dtype=parameter.dtype, device=device)
        owner._parameters[name] = nn.Parameter(values)
    yield
    owner._parameters.update(taken)


def adopt(unit: Unit, members: Sequence[Member], world: Axis) -> None:
    """Fill a unit with the values of rank 0, and make the module's parameters views of it.

    Parameters stay the same objects, so that code that holds one, such as an optimizer, gets an error
    (`parameters.py`); one on the meta device is replaced, and kept as `Member.former`.
    """
    take(unit, {m.name: m.places[0].owner._parameters[m.places[0].attribute] for m in members}, world)
    by_name = {member.name: member for member in members}
    in_order = [by_name[interval.name] for interval in unit.layout.intervals]
    for index, member in enumerate(in_order):
        if member.parameter.is_meta:
            nothing = torch.empty(0, dtype=member.parameter.dtype, device=unit.device)
            member.former, member.parameter = member.parameter, nn.Parameter(nothing, requires_grad=unit.trainable)
        member.unit, member.index, member.parameter.grad = unit, index, None
        for place in member.places:
            place.owner._parameters[place.attribute] = member.parameter
    unit.parameters.move_to([member.parameter for member in in_order])


def take(unit: Unit, values: Mapping[str, Tensor | None], world: Axis) -> None:
    """Fill a unit with rank 0's `values`, given by parameter name; those of other ranks are not read."""
    dtype = unit.masters.dtype if unit.trainable else unit.resting.parameters.values.dtype
    whole = torch.zeros(unit.numel, dtype=dtype, device=unit.device)
    if world.rank == 0:
        for interval in unit.layout.intervals:
            value = values[interval.name]
            assert value is not None, "rank 0 has it"
            whole[interval.start : interval.stop].copy_(value.detach().reshape(-1))
    whole = from_first(whole, world)
    starts = {interval.name: interval.start for interval in unit.layout.intervals}
    unit.resting.fill(lambda name, start, stop: whole[starts[name] + start : starts[name] + stop])


def adopt_buffers(module: nn.Module, memory: Memory) -> None:
    """Move a module's buffers to the device; every rank gets the values of rank 0.

    Raises:
        UserError: 509, a buffer is on the meta device and has no values.
    """
    world, device, initial = memory.world, memory.device, memory.initial

    def check() -> None:
        odd = next((name for name, _, _, buffer in buffers_of(module) if buffer.is_meta), None)
        if odd is not None and world.rank == 0 and initial is None:
            what = f"{odd} is a buffer on the meta device, and nothing gives it values"
            raise UserError(509, what, "make it in the module's reset_parameters, or build the module on a device")

    agree(world, device, check)
    moved: dict[int, Tensor] = {}
    for name, owner, attribute, buffer in buffers_of(module):
        if id(buffer) not in moved:
            here = torch.zeros_like(buffer, device=device) if world.rank or buffer.is_meta else buffer.to(device)
            if buffer.is_meta and world.rank == 0 and initial is not None:
                initial(name, here)
            moved[id(buffer)] = from_first(here.contiguous(), world)
        owner._buffers[attribute] = moved[id(buffer)]


def from_first(x: Tensor, world: Axis) -> Tensor:
    """Return rank 0's x on all ranks. x is contiguous, and overwritten on the other ranks."""
    if world.size == 1 or not x.numel():
        return x
    if world.rank > 0:
        x.zero_()
    flat = x.view(-1)
    all_reduce(flat.view(torch.uint8) if x.dtype == torch.bool else flat, world, "initial")
    return x
