"""Divide a module into parts, whose parameters are gathered together, and find the place of every parameter.

A part is a submodule with all parameters below it that belong to no part inside it; the rest is the part `ROOT`,
the module itself. A parameter that submodules of several parts share belongs to the root, which is there during the
whole forward and backward.

A part has a unit for each dtype of its parameters, and units of their own for frozen ones: a unit is one flat buffer.
"""

import zlib
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from megazero.base.errors import UserError
from megazero.zero.unit import Unit

ROOT = "(root)"
Units = Iterable["str | type[nn.Module] | nn.Module"]


@dataclass(frozen=True)
class Place:
    """A place where a module keeps a parameter: `owner.attribute`. A shared parameter has several."""

    owner: nn.Module
    attribute: str


@dataclass(eq=False)
class Member:
    """A parameter of a module.

    Attributes:
        name: its first full name in the module.
        parameter: the module finds it in its places: that which the module came with, later one of the unit's.
        places: all that it has.
        unit: has its values.
        index: its number among the unit's parameters.
        former: what the module came with, if that was on the meta device: whoever holds it is refused.
    """

    name: str
    parameter: nn.Parameter
    places: tuple[Place, ...]
    unit: Unit = field(init=False)
    index: int = field(init=False)
    former: nn.Parameter | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the parameter's shape as a whole."""
        return self.unit.layout.intervals[self.index].shape

    @property
    def values(self) -> Tensor:
        """Return the parameter's values in a unit that is whole here."""
        return self.unit.parameters.values()[self.index].detach()


@dataclass(eq=False)
class Part:
    """A submodule whose parameters are gathered together.

    Attributes:
        name: of the submodule, or ROOT.
        module: the submodule.
        members: the parameters that belong to it, trained ones first.
        trained: members that may be trained; set by `find_units`.
        units: of all members; set by `find_units`.
        sharded: some unit rests in shards.
        running: a call of it runs now.
        open: its calls with gradients in this epoch that no backward has reached. When a graph is freed is each
            rank's own matter, so a call whose output is dropped stays here until the epoch ends.
        after: the part that was called after it in the last forward: it is prefetched.
        nodes: of autograd, which take the gradients of its parameters' uses outside of its forward.
        strays: such gradients that are still to come in this backward.
    """

    name: str
    module: nn.Module
    members: list[Member] = field(default_factory=list)
    trained: list[Member] = field(init=False)
    units: list[Unit] = field(init=False)
    sharded: bool = field(init=False)
    running: bool = False
    open: set[Any] = field(default_factory=set)
    after: "Part | None" = None
    nodes: list[Node] = field(default_factory=list)
    strays: int = 0

    def __post_init__(self) -> None:
        self.root, self.number = self.name == ROOT, zlib.crc32(self.name.encode())
        self.looks_up = isinstance(self.module, nn.Embedding | nn.EmbeddingBag)  # its backward reads nothing of it

    def find_units(self) -> None:
        """Find the units of the members, trained ones first."""
        self.members.sort(key=lambda member: not member.unit.trainable)
        self.trained = [member for member in self.members if member.unit.trainable]
        self.units = list(dict.fromkeys(member.unit for member in self.members))
        self.sharded = not all(unit.parameters.rest_whole for unit in self.units)

    @property
    def here(self) -> bool:
        """Return whether the values of all its units are whole here."""
        return all(unit.parameters.whole is not None for unit in self.units)

    @property
    def live(self) -> list[Member]:
        """Return the trained parameters that are not frozen now."""
        return _asking(self.trained)

    @property
    def thawed(self) -> list[Member]:
        """Return the parameters that were frozen when they got their units, and are not frozen now."""
        return _asking(self.members[len(self.trained) :])


def _asking(members: Sequence[Member]) -> list[Member]:
    """Return those that ask for gradients."""
    with torch._C.DisableTorchFunctionSubclass():  # `ShardedParameter` would take 16 times as long
        return [member for member in members if member.parameter.requires_grad]


def parts_of(module: nn.Module, units: Units | None, without: Container[str] = ()) -> list[Part]:
    """Return the root and the parts of a module that have parameters, in the order of the module.

    Args:
        units: submodules that are parts: names, patterns of names, classes, or the submodules; None: repeated blocks.

    Raises:
        UserError: 500, one of `units` is no submodule.
    """
    modules = dict(module.named_modules())
    names = _repeated(module) if units is None else submodules(module, units, "units")
    names = {_reader(name, modules) for name in names} - {""}
    parts = {"": Part(ROOT, module)} | {name: Part(name, modules[name]) for name in modules if name in names}
    members: dict[nn.Parameter, tuple[str, list[Place], set[str]]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):  # a shared one at each of its places
        owner_name, _, attribute = name.rpartition(".")
        if owner_name not in without:
            _, places, homes = members.setdefault(parameter, (name, [], set()))
            place = Place(module.get_submodule(owner_name), attribute)
            if place not in places:
                places.append(place)
            homes.add(_home(owner_name, parts))
    for parameter, (name, places, homes) in members.items():
        parts[homes.pop() if len(homes) == 1 else ""].members.append(Member(name, parameter, tuple(places)))
    return [part for name, part in parts.items() if part.members or not name]


def _reader(name: str, modules: dict[str, nn.Module]) -> str:
    """Return the name of the submodule of torch that reads the weights of a submodule and never calls it, or its own.

    Attention reads those of its projection; a layer of a transformer, in evaluation, those of all in it.
    """
    parents = [name[:at] for at in range(len(name)) if name[at] == "."]
    readers = nn.MultiheadAttention | nn.TransformerEncoderLayer
    return next((parent for parent in ["", *parents] if name and isinstance(modules[parent], readers)), name)


def _home(name: str, parts: dict[str, Part]) -> str:
    """Return the name of the innermost part that a submodule is in."""
    while name and name not in parts:
        name = name.rpartition(".")[0]
    return name


def _repeated(module: nn.Module) -> set[str]:
    """Return the names of repeated blocks: children of one class, of the outermost containers that have several."""
    found: set[str] = set()

    def visit(name: str, here: nn.Module) -> None:
        children = [(f"{name}.{child}".lstrip("."), below) for child, below in here.named_children()]
        container = isinstance(here, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        blocks = [below for _, below in children if container and next(below.parameters(), None) is not None]
        classes = [type(below) for below in blocks]
        for child, below in children:
            if below in blocks and classes.count(type(below)) > 1:
                found.add(child)
            else:
                visit(child, below)

    visit("", module)
    return found


def submodules(module: nn.Module, units: Units, what: str) -> set[str]:
    """Return the names of the submodules that were asked for. Raises UserError 500: `what` has one that is none."""
    modules = {name: one for name, one in module.named_modules() if name}
    found: set[str] = set()
    for unit in [units] if isinstance(units, str) else units:
        if isinstance(unit, str):
            names = [name for name in modules if fnmatchcase(name, unit)]
        elif isinstance(unit, type):
            names = [name for name, one in modules.items() if isinstance(one, unit)]
        else:
            names = [name for name, one in modules.items() if one is unit]
        if not names:
            said = unit if isinstance(unit, str) else getattr(unit, "__name__", type(unit).__name__)
            raise UserError(500, f"{what}: {said!r} is no submodule", _known(modules), where=type(module).__name__)
        found |= set(names)
    return found


def _known(names: Iterable[str]) -> str:
    """Return in words which names there are."""
    some = list(names)
    more = f" and {len(some) - 6} more" if len(some) > 6 else ""
    return f"it has {', '.join(some[:6])}{more}" if some else "it has none"


def buffers_of(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield (name, owner, attribute, buffer) of every buffer, a shared one at each of its places."""
    for owner_name, owner in module.named_modules():
        for attribute, buffer in list(owner._buffers.items()):
            if buffer is not None:
                yield f"{owner_name}.{attribute}".lstrip("."), owner, attribute, buffer


def saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a state_dict has by name, a shared one once."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, owner, attribute, buffer in buffers_of(module):
        if attribute not in owner._non_persistent_buffers_set:
            found.setdefault(id(buffer), (name, buffer))
    return dict(found.values())


def fitting(patterns: str | Sequence[str], names: Sequence[str], what: str) -> set[str]:
    """Return the names that fit any of some patterns. Raises UserError 500: one of them fits none."""
    found: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        fit = {name for name in names if fnmatchcase(name, pattern)}
        if not fit:
            raise UserError(500, f"{what}: {pattern!r} fits no parameter", _known(names))
        found |= fit
    return found
