"""Show a module the gathered values of its parameters, and route its calls and gradients through `Calls`.

A module reads a parameter as an attribute of its owner. An entry in the owner's `__dict__` hides the parameter of that
name: a tensor that is put there is found in place of the parameter, until the tensor is removed.

Where autograd saves a sharded parameter, its place is saved instead of its values (`zero/saved.py`). torch calls only
the innermost saved-tensor hooks, so all other tensors are passed on to the outer ones (such as those of
`torch.utils.checkpoint`).
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
    """Make an embedding return sparse gradients where it looks up fewer ids than it has rows.

    Otherwise torch writes a gradient as large as the table, most of it zeros, and adds it to that of other uses. 16-bit
    tables keep dense gradients, because torch sums sparse rows in 16 bits; so do tables with a padding row on a GPU,
    where torch would have to wait for the indices.
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
    """Make a parameter's owners find `value` in place of the parameter."""
    for place in member.places:
        place.owner.__dict__[place.attribute] = value
    _tell_recurrent(dict.fromkeys(place.owner for place in member.places))


def hide(part: Part) -> None:
    """Undo `put` for a part: its module finds the parameters again."""
    owners: dict[nn.Module, None] = {}
    for member in part.members:
        for place in member.places:
            if place.owner.__dict__.pop(place.attribute, None) is not None:
                owners[place.owner] = None
    _tell_recurrent(owners)


def _tell_recurrent(owners: Iterable[nn.Module]) -> None:
    """Make the list of parameters that recurrent modules keep refer to the values that are shown."""
    for owner in owners:
        if isinstance(owner, nn.RNNBase):
            owner.__dict__["_flat_weights"] = [getattr(owner, name, None) for name in owner._flat_weights_names]


def watch(part: Part, unit: Unit, take: Callable[[Part, Member, nn.Parameter], object]) -> None:
    """Pass the gradients that reach a unit's parameters themselves to `take`.

    If the unit rests whole, the part keeps the autograd nodes that receive these gradients.
    """
    for member in part.trained:
        if member.unit is not unit:
            continue
        parameter, asked = member.parameter, member.parameter.requires_grad
        with torch._C.DisableTorchFunctionSubclass():  # `ShardedParameter` refuses hooks
            parameter.requires_grad_(True)
            parameter.register_post_accumulate_grad_hook(partial(take, part, member))
            if unit.parameters.rest_whole:
                part.nodes.append(get_gradient_edge(parameter).node)
            parameter.requires_grad_(asked)


def tensors_in(outputs: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples, dictionaries and dataclasses."""
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, list | tuple):
        for one in outputs:
            yield from tensors_in(one)
    elif isinstance(outputs, Mapping):
        yield from tensors_in([*outputs.values()])
    elif is_dataclass(outputs):
        yield from tensors_in(vars(outputs))


def prepare(part: Part, run: Callable[..., Any], take: Callable[[Part, Member, nn.Parameter], object]) -> None:
    """Replace a part's forward, in place, by one that returns `run(part, forward, arguments, named)`.

    A module that was compiled stays compiled inside the call. A later call from code that torch.compile compiles raises
    UserError 510. Plain embeddings get gradients of rows only (`give_rows`).

    Args:
        take: called as take(part, member, parameter) when autograd has added a gradient to a parameter itself, not to
            the gathered values shown in its place.
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
    """Refuse a call from code that torch.compile compiles, because the gathering of parameters cannot be traced.

    Raises:
        UserError: 510.
    """
    if get_eval_frame_callback() is not None:
        what = f"{name} was called from a module or function that torch.compile compiles"
        raise UserError(510, what, "compile each block instead: for block in module.blocks: block.compile()")


refuse_compiled._torchdynamo_disable = True  # type: ignore[attr-defined]  # called, not traced, without a warning


@dataclass(eq=False, slots=True)
class _Kept:
    """A saved tensor that is no parameter, and its version when saved, which torch does not check under hooks."""

    tensor: Tensor
    version: int


def saving(need: Callable[[Unit], object], gathered: Mapping[int, Unit]) -> AbstractContextManager[object]:
    """Return the saved-tensor hooks for a call of a part.

    Args:
        need: gathers a unit in backward.
        gathered: the sharded units that are gathered, by the storage of their values.
    """
    outer = _top_saved_tensors_default_hooks(False)
    pack_outer, unpack_outer = outer or (lambda x: x, lambda x: x)

    def keep(x: Tensor) -> Any:
        if outer or x.is_inference():
            return pack_outer(x)
        return _Kept(x.detach(), x._version)  # x itself would form a cycle with its graph

    def restore(kept: Any) -> Tensor:
        if not isinstance(kept, _Kept):
            return unpack_outer(kept)
        if kept.tensor._version != kept.version:
            what = f"a tensor that backward needs, of shape {tuple(kept.tensor.shape)}, was changed in place"
            raise UserError(506, what, "change a copy")
        return kept.tensor

    def need_once(unit: Unit) -> None:
        if torch.is_grad_enabled():  # a second backward would find another unit in this one's memory
            what = f"create_graph=True for {unit.name}, which is sharded"
            raise UserError(505, what, "use stage 0, 1 or 2 for gradients of gradients")
        need(unit)

    return saved_places(gathered, [], need=need_once, keep=keep, restore=restore)
