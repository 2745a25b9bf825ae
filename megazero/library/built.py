"""The parts of a module once their parameters have memory, and how a module is made to see them.

A module looks for a parameter as an attribute of its owner. What an object has itself hides what its class looks up: so
a tensor in the owner's own dictionary is found in the place of the parameter, and when it is taken out again, the
parameter is.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.autograd.graph import Node, get_gradient_edge

from megazero.base.errors import UserError
from megazero.library.parts import Part, Place
from megazero.zero.unit import Unit

Forward = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Shown:
    """A parameter as its part shows it.

    Attributes:
        unit: that it is in.
        index: its place among the unit's parameters.
        name: its full name.
        places: where the module looks for it.
        parameter: what it finds there while it is not shown.
    """

    unit: Unit
    index: int
    name: str
    places: tuple[Place, ...]
    parameter: nn.Parameter

    def named_places(self) -> Iterator[tuple[tuple[nn.Module, str], str]]:
        """Yield (owner, attribute) of each place with the parameter's name."""
        for place in self.places:
            yield (place.owner, place.attribute), self.name

    @property
    def tables(self) -> Iterator[nn.Embedding]:
        """Yield the plain embeddings that look it up: not those that compute what they look up."""
        for place in self.places:
            owner = place.owner
            is_weight = place.attribute == "weight" and "forward" not in vars(owner)
            if is_weight and isinstance(owner, nn.Embedding) and type(owner).forward is nn.Embedding.forward:
                yield owner

    @property
    def numel(self) -> int:
        """Return the number of the parameter's elements."""
        interval = self.unit.layout.intervals[self.index]
        return interval.stop - interval.start

    @property
    def values(self) -> Tensor:
        """Return the parameter's values in a unit that is whole here."""
        return self.unit.parameters.values()[self.index].detach()


def _asking(shown: list[Shown]) -> list[Shown]:
    """Return those that ask for gradients, past `ShardedParameter`, which would take 16 times as long."""
    with torch._C.DisableTorchFunctionSubclass():
        return [one for one in shown if one.parameter.requires_grad]


@dataclass(eq=False)
class BuiltPart:
    """A part whose parameters have memory.

    Attributes:
        part: what it was made of.
        trained, frozen: its parameters.
        root: it stays gathered until the backward is over.
        depth: calls of it that run now, one inside the other.
        open: calls whose backward is still to come.
        looks_up: it is an embedding, whose backward reads nothing of it.
        after: the part that was called after it in the last forward: it is prefetched.
        nodes: of autograd, which take the gradients of its parameters' uses outside of its forward.
        strays: such gradients that are still to come in this backward.
    """

    part: Part
    trained: list[Shown]
    frozen: list[Shown]
    root: bool
    depth: int = 0
    open: int = 0
    after: "BuiltPart | None" = None
    nodes: list[Node] = field(default_factory=list)
    strays: int = 0
    shown: list[Shown] = field(init=False)
    units: list[Unit] = field(init=False)
    looks_up: bool = field(init=False)
    sharded: bool = field(init=False)
    number: int = field(init=False)

    def __post_init__(self) -> None:
        self._find()
        self.looks_up = isinstance(self.part.module, nn.Embedding | nn.EmbeddingBag)
        self.number = zlib.crc32(self.part.name.encode())

    @property
    def live(self) -> list[Shown]:
        """Return the trained parameters that are not frozen now."""
        return _asking(self.trained)

    @property
    def thawed(self) -> list[Shown]:
        """Return the parameters that were frozen, and are not any more."""
        return _asking(self.frozen)

    def give(self, unit: Unit, new: Unit) -> None:
        """Let a trained unit have the place of one that was frozen."""
        self.trained += [replace(shown, unit=new) for shown in self.frozen if shown.unit is unit]
        self.frozen = [shown for shown in self.frozen if shown.unit is not unit]
        self._find()

    def _find(self) -> None:
        self.shown = [*self.trained, *self.frozen]
        self.units = list(dict.fromkeys(shown.unit for shown in self.shown))
        self.sharded = not all(unit.parameters.rest_whole for unit in self.units)


def give_rows(table: nn.Embedding) -> None:
    """Let an embedding give gradients of the rows that it looks up, where these are fewer than it has.

    Else torch writes a gradient as large as the table, most of it zeros, and adds it to that of other uses. 16-bit
    tables are left alone, because torch sums their rows in 16 bits; so are those with a padding row on a GPU, where it
    would have to wait for the indices.
    """
    plain = table.forward

    @wraps(plain)
    def forward(ids: Tensor) -> Tensor:
        weight = table.weight
        few = ids.numel() < table.num_embeddings and not table.scale_grad_by_freq
        waits = ids.device.type != "cpu" and table.padding_idx is not None
        asked = torch.is_grad_enabled() and weight.requires_grad and not torch.compiler.is_compiling()
        if not (few and asked and weight.itemsize >= 4) or waits:
            return plain(ids)
        return F.embedding(ids, weight, table.padding_idx, table.max_norm, table.norm_type, sparse=True)

    table.forward = forward  # type: ignore[method-assign]


def put(shown: Shown, value: Tensor) -> None:
    """Let a parameter's owners find `value` in its place: what an object has itself hides what its class looks up."""
    for place in shown.places:
        place.owner.__dict__[place.attribute] = value
    _tell_recurrent(dict.fromkeys(place.owner for place in shown.places))


def hide(part: BuiltPart) -> None:
    """Let a part's module find its own parameters again."""
    owners: dict[nn.Module, None] = {}
    for shown in part.shown:
        for place in shown.places:
            if place.owner.__dict__.pop(place.attribute, None) is not None:
                owners[place.owner] = None
    _tell_recurrent(owners)


def _tell_recurrent(owners: Iterable[nn.Module]) -> None:
    """Let recurrent modules find their parameters: they keep a list of them."""
    for owner in owners:
        if isinstance(owner, nn.RNNBase):
            owner.__dict__["_flat_weights"] = [getattr(owner, name, None) for name in owner._flat_weights_names]


def watch(part: BuiltPart, unit: Unit, take: Callable[[BuiltPart, Shown, nn.Parameter], object]) -> None:
    """Let `take` get the gradients that come to a unit's parameters themselves.

    Where the unit rests whole, the part keeps the nodes of autograd that get them.
    """
    for shown in part.trained:
        if shown.unit is not unit:
            continue
        parameter, asked = shown.parameter, shown.parameter.requires_grad
        with torch._C.DisableTorchFunctionSubclass():  # parameters may watch what others do with them
            parameter.requires_grad_(True)
            parameter.register_post_accumulate_grad_hook(partial(take, part, shown))
            if unit.parameters.rest_whole:
                part.nodes.append(get_gradient_edge(parameter).node)
            parameter.requires_grad_(asked)


def tensors_in(outputs: Any) -> Iterator[Tensor]:
    """Yield the tensors in lists, tuples, dictionaries and dataclasses, one inside of the other."""
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, list | tuple):
        for one in outputs:
            yield from tensors_in(one)
    elif isinstance(outputs, Mapping):
        for one in outputs.values():
            yield from tensors_in(one)
    elif is_dataclass(outputs):
        yield from tensors_in(list(vars(outputs).values()))


def prepare(part: BuiltPart, run: Callable[..., Any], take: Callable[[BuiltPart, Shown, nn.Parameter], object]) -> None:
    """Let calls of a part go through `run`, and gradients that come to its parameters themselves to `take`."""
    for table in dict.fromkeys(table for shown in part.trained for table in shown.tables):
        give_rows(table)
    wrap(part, run)
    for unit in part.units:
        watch(part, unit, take)


def wrap(part: BuiltPart, run: Callable[..., Any]) -> None:
    """Let every call of a part's module run between its events; a module that is compiled stays so inside of them.

    A call of it from code that torch.compile compiles is refused.
    """
    module = part.part.module
    compiled: Forward | None = module._compiled_call_impl
    forward: Forward = compiled or module.forward

    @wraps(forward)
    def call(*arguments: Any, **named: Any) -> Any:
        refuse_compiled(part.part.name)
        return run(part, forward, arguments, named)

    if compiled is None:
        module.forward = call
    else:
        module._compiled_call_impl = call


def refuse_compiled(name: str) -> None:
    """Refuse a call from code that torch.compile compiles: what gathers parameters cannot be traced.

    Raises:
        UserError: 510.
    """
    if get_eval_frame_callback() is not None:
        what = f"{name} was called from a module or function that torch.compile compiles"
        raise UserError(510, what, "compile each block instead: for block in module.blocks: block.compile()")


refuse_compiled._torchdynamo_disable = True  # type: ignore[attr-defined]  # it is called, not traced: without a warning
