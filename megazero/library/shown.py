"""Show a module the gathered values of its parameters, and let its calls and gradients go through `Calls`.

A module looks for a parameter as an attribute of its owner. What an object has itself hides what its class looks up: so
a tensor in the owner's own dictionary is found in the place of the parameter, and when it is taken out again, the
parameter is.

Where autograd saves a sharded parameter, its place is kept (`zero/saved.py`). torch asks only the innermost hooks; so
whatever is no parameter of ours goes to those around (of `torch.utils.checkpoint`, say).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, is_dataclass
from functools import partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.autograd.graph import get_gradient_edge

from megazero.base.errors import UserError
from megazero.library.parts import Member, Part
from megazero.zero.saved import saved_places
from megazero.zero.unit import Unit

Forward = Callable[..., Any]


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


def put(member: Member, value: Tensor) -> None:
    """Let a parameter's owners find `value` in its place."""
    for place in member.places:
        place.owner.__dict__[place.attribute] = value
    _tell_recurrent(dict.fromkeys(place.owner for place in member.places))


def hide(part: Part) -> None:
    """Let a part's module find its own parameters again."""
    owners: dict[nn.Module, None] = {}
    for member in part.members:
        for place in member.places:
            if place.owner.__dict__.pop(place.attribute, None) is not None:
                owners[place.owner] = None
    _tell_recurrent(owners)


def _tell_recurrent(owners: Iterable[nn.Module]) -> None:
    """Let recurrent modules find their parameters: they keep a list of them."""
    for owner in owners:
        if isinstance(owner, nn.RNNBase):
            owner.__dict__["_flat_weights"] = [getattr(owner, name, None) for name in owner._flat_weights_names]


def watch(part: Part, unit: Unit, take: Callable[[Part, Member, nn.Parameter], object]) -> None:
    """Let `take` get the gradients that come to a unit's parameters themselves.

    Where the unit rests whole, the part keeps the nodes of autograd that get them.
    """
    for member in part.trained:
        if member.unit is not unit:
            continue
        parameter, asked = member.parameter, member.parameter.requires_grad
        with torch._C.DisableTorchFunctionSubclass():  # parameters may watch what others do with them
            parameter.requires_grad_(True)
            parameter.register_post_accumulate_grad_hook(partial(take, part, member))
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


def prepare(part: Part, run: Callable[..., Any], take: Callable[[Part, Member, nn.Parameter], object]) -> None:
    """Let calls of a part go through `run`, and gradients that come to its parameters themselves to `take`.

    A module that is compiled stays so inside of a call. A call from code that torch.compile compiles is refused.
    """
    for place in (place for member in part.trained for place in member.places):
        owner, looked_up = place.owner, place.attribute == "weight" and "forward" not in vars(place.owner)
        if looked_up and isinstance(owner, nn.Embedding) and type(owner).forward is nn.Embedding.forward:
            give_rows(owner)
    for unit in part.units:
        watch(part, unit, take)
    module = part.module
    compiled: Forward | None = module._compiled_call_impl
    forward: Forward = compiled or module.forward

    @wraps(forward)
    def call(*arguments: Any, **named: Any) -> Any:
        refuse_compiled(part.name)
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


@dataclass(eq=False, slots=True)
class _Kept:
    """A saved tensor that is no parameter, and its version then: torch does not check it where there are hooks."""

    tensor: Tensor
    version: int


def saving(need: Callable[[Unit], object], gathered: Mapping[int, Unit]) -> AbstractContextManager[object]:
    """Return the hooks around a call of a part.

    Args:
        need: gathers a unit in backward.
        gathered: the sharded units whose parameters are whole, by the storage that holds these.
    """
    outer = _top_saved_tensors_default_hooks(False)
    pack_outer, unpack_outer = outer or (lambda x: x, lambda x: x)

    def keep(x: Tensor) -> Any:
        if outer or x.is_inference():
            return pack_outer(x)
        return _Kept(x.detach(), x._version)  # the tensor itself would hold the graph that holds it

    def restore(kept: Any) -> Tensor:
        if not isinstance(kept, _Kept):
            return unpack_outer(kept)
        if kept.tensor._version != kept.version:
            what = f"a tensor that backward needs, of shape {tuple(kept.tensor.shape)}, was changed in place"
            raise UserError(506, what, "change a copy")
        return kept.tensor

    def need_once(unit: Unit) -> None:
        if torch.is_grad_enabled():  # a second backward would find another unit in the memory of this one
            what = f"create_graph=True of {unit.name}, which rests in shards"
            raise UserError(505, what, "take gradients of gradients in stages 0 to 2")
        need(unit)

    return saved_places(gathered, [], need=need_once, keep=keep, restore=restore)
