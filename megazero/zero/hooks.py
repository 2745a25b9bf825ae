"""The events of a unit's life in a step, wired around the parts of a model that knows nothing of them.

    pre_forward    a part is about to run: its units' parameters are there, the next part's are on their way
    post_forward   it has run: sharded parameters are released (but by the model's last part: its backward comes next)
    pre_backward   its gradient has arrived: what its backward needs is there, what the part before needs on its way
    post_backward  two moments: the last gradient of a unit has been delivered (`gradients.py`), which begins its
    reduction,
                   and the whole part's backward has run, after which its parameters are released

The two backward events of a part are identity functions of autograd around it. What a part saves for its backward of a
sharded unit's parameters is replaced by (unit, interval), by torch's saved_tensors_hooks, and taken from wherever the
unit's parameters are when it is needed: buffers rotate. A unit of which a part saved nothing (the embedding's table)
is not gathered for its backward. A part that is replayed in its backward saves nothing before, and needs all it has.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megazero.zero.gather import Gather
from megazero.zero.unit import Unit

Layer = Callable[..., Tensor]


@dataclass(frozen=True)
class _Saved:
    """A piece of a unit's parameters, wherever they are."""

    unit: Unit
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    def view(self) -> Tensor:
        assert self.unit.whole is not None, f"backward needs unit {self.unit.layout.name}, which is not there"
        return self.unit.whole.as_strided(self.shape, self.stride, self.offset)


@dataclass(eq=False)
class _Call:
    """One run of a part with its backward to come.

    Attributes:
        before: the run of the part before it in the same forward.
        needed: the units of which it saved parameters, or will.
    """

    gather: Gather
    units: list[Unit]
    before: "_Call | None"
    needed: list[Unit] = field(default_factory=list)

    def pack(self, tensor: Tensor) -> Tensor | _Saved:
        at = tensor.untyped_storage()._cdata
        for unit in self.units:
            whole = None if unit.parameters_rest_whole else unit.whole
            if whole is not None and whole.untyped_storage()._cdata == at:
                if unit not in self.needed:
                    self.needed.append(unit)
                return _Saved(unit, int(tensor.storage_offset()), tensor.shape, tensor.stride())
        return tensor.detach()  # itself it would hold the graph that holds it

    def pre_backward(self) -> None:
        self.gather.unshard(self.needed)
        if self.before is not None:
            self.gather.prefetch(self.before.needed)

    def post_backward(self) -> None:
        next_ones = self.before.needed if self.before is not None else []
        self.gather.reshard([unit for unit in self.units if unit not in next_ones])


def _unpack(packed: Tensor | _Saved) -> Tensor:
    return packed.view() if isinstance(packed, _Saved) else packed


class _Boundary(torch.autograd.Function):
    """The identity, whose backward is an event."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, event: Callable[[], None]) -> Tensor:
        ctx.event = event
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.event()
        return grads[0], None


class ShardedLayer:
    """A part of the model whose units come when they are needed.

    Args:
        part: called with what comes from the part before, and whatever else it takes.
        units: that it uses.
        replayed: it runs again in its backward, and needs all of them then.
    """

    def __init__(self, part: Layer, units: list[Unit], gather: Gather, *, recomputed: bool):
        self.part, self.units, self._gather, self._replayed = part, units, gather, recomputed
        self.before: ShardedLayer | None = None
        self.after: ShardedLayer | None = None
        self.keep = False
        self._call: _Call | None = None

    def __call__(self, x: Tensor, *circumstances: Any) -> Tensor:
        next_ones = self.after.units if self.after is not None else []
        self._gather.unshard(self.units)
        self._gather.prefetch(next_ones)
        if torch.is_grad_enabled() and not all(unit.parameters_rest_whole for unit in self.units):
            return self._with_backward(x, circumstances, next_ones)
        y = self.part(x, *circumstances)
        self._release(next_ones)
        return y

    def _with_backward(self, x: Tensor, circumstances: Sequence[Any], next_ones: list[Unit]) -> Tensor:
        before = self.before._call if self.before is not None else None
        self._call = call = _Call(self._gather, self.units, before, list(self.units) if self._replayed else [])
        if x.is_floating_point():
            x = _Boundary.apply(x, call.post_backward)
        with torch.autograd.graph.saved_tensors_hooks(call.pack, _unpack):
            y = self.part(x, *circumstances)
        if not self.keep:
            self._release(next_ones)
        return _Boundary.apply(y, call.pre_backward)

    def _release(self, next_ones: list[Unit]) -> None:
        self._gather.reshard([unit for unit in self.units if unit not in next_ones])


def watch(
    parts: Sequence[Layer],
    units: Sequence[list[Unit]],
    gather: Gather,
    *,
    keep_last: bool,
    recomputed: Container[Layer],
) -> list[Layer]:
    """The same parts, each with the units that it uses; the last one's stay after a forward that has a backward.

    Args:
        replayed: parts that run again in their backward.
    """
    watched = [
        ShardedLayer(part, of_part, gather, recomputed=part in recomputed)
        for part, of_part in zip(parts, units, strict=True)
    ]
    for first, second in pairwise(watched):
        first.after, second.before = second, first
    watched[-1].keep = keep_last
    return list(watched)
