"""Divide a module into parts, each gathered as a whole, and find the places of every parameter.

A part is a submodule with all parameters below it that belong to no part inside it; the rest is the part `ROOT`,
the module itself. A parameter that submodules of several parts share belongs to the root, which stays gathered
during the whole forward and backward.

A part has one unit, a flat buffer, for each dtype of its parameters, and separate units for frozen ones.
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
        parameter: the module's parameter; it becomes a view of the unit (`adopt.py`).
        places: all places of the parameter.
        unit: the unit that holds its values.
        index: its index among the unit's parameters.
        former: the original parameter, if it was on the meta device: a use of it raises an error.
    """

    name: str
    parameter: nn.Parameter
    places: tuple[Place, ...]
    unit: Unit = field(init=False)
    index: int = field(init=False)
    former: nn.Parameter | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the whole parameter."""
        return self.unit.layout.intervals[self.index].shape

    @property
    def values(self) -> Tensor:
        """Return the parameter's values; its unit must be gathered."""
        return self.unit.parameters.values()[self.index].detach()


class Part:
    """A submodule whose parameters are gathered together.

    Attributes:
        name: the name of the submodule, or ROOT.
        module: the submodule.
        members: the parameters that belong to it, trained ones first.
        trained: members that may be trained; set by `find_units`.
        units: the units of all members; set by `find_units`.
        sharded: whether any of its units rests in shards.
        running: whether a call of it is running.
        open: its calls with gradients in this epoch that no backward has reached. Ranks may free a graph at different
            times, so a call whose output is dropped stays here until the epoch ends.
        after: the part that was called after it in the last forward, to be prefetched.
        nodes: the autograd nodes that get the gradients of its parameters' uses outside its forward.
        strays: the number of such gradients that will still arrive in this backward.
    """

    def __init__(self, name: str, module: nn.Module):
        self.name, self.module, self.members = name, module, list[Member]()
        self.root, self.number = name == ROOT, zlib.crc32(name.encode())
        self.looks_up = isinstance(module, nn.Embedding | nn.EmbeddingBag)  # its backward reads no weights
        self.running, self.open, self.nodes, self.strays = False, set[Any](), list[Node](), 0
        self.after: Part | None = None

    def find_units(self) -> None:
        """Find the units of the members, trained ones first."""
        self.members.sort(key=lambda member: not member.unit.trainable)
        self.trained = [member for member in self.members if member.unit.trainable]
        self.units = list(dict.fromkeys(member.unit for member in self.members))
        self.sharded = not all(unit.parameters.rest_whole for unit in self.units)

    @property
    def here(self) -> bool:
        """Return whether all its units are whole on this rank."""
        return all(unit.parameters.whole is not None for unit in self.units)

    @property
    def live(self) -> list[Member]:
        """Return the trained parameters that are not frozen now."""
        return _asking(self.trained)

    @property
    def thawed(self) -> list[Member]:
        """Return the parameters that were frozen when they got their units, and have been unfrozen since."""
        return _asking(self.members[len(self.trained) :])


def _asking(members: Sequence[Member]) -> list[Member]:
    """Return the members that require gradients."""
    with torch._C.DisableTorchFunctionSubclass():  # through `ShardedParameter` it takes 16 times as long
        return [member for member in members if member.parameter.requires_grad]


def parts_of(module: nn.Module, units: Units | None, without: Container[str] = ()) -> list[Part]:
    """Return the root and the parts of a module that have parameters, in the order of the module.

    Args:
        units: submodules that are parts: names, patterns of names, classes, or the submodules; None: repeated blocks.
        without: the names of submodules whose own parameters are left out.

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
    """Return the name of the torch module that reads a submodule's weights without calling it, or its own name.

    nn.MultiheadAttention does so with its projection; nn.TransformerEncoderLayer, in evaluation, with all submodules.
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
    """Return the names of repeated blocks: children of one class in a container, the outermost with several."""
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
    """Return the names of submodules that `units` selects. Raises UserError 500, naming `what`: one selects none."""
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
            raise UserError(500, f"{what}: {said!r} is not a submodule", _known(modules), where=type(module).__name__)
        found |= set(names)
    return found


def _known(names: Iterable[str]) -> str:
    """Return a text for an error: "it has A, B and 3 more", with the first six names."""
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
    """Return the buffers that a state_dict has, by name; a shared buffer appears once."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, owner, attribute, buffer in buffers_of(module):
        if attribute not in owner._non_persistent_buffers_set:
            found.setdefault(id(buffer), (name, buffer))
    return dict(found.values())


def fitting(patterns: str | Sequence[str], names: Sequence[str], what: str) -> set[str]:
    """Return the names that match any of the patterns. Raises UserError 500, naming `what`: a pattern matches none."""
    found: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        fit = {name for name in names if fnmatchcase(name, pattern)}
        if not fit:
            raise UserError(500, f"{what}: {pattern!r} matches no parameter", _known(names))
        found |= fit
    return found
