"""Gather, release and reduce a unit's values around the layers of a model that knows nothing of units.

    pre_forward    a layer is about to run: wait for its units' parameters, prefetch those of the next layer
    post_forward   it has run: release sharded parameters (except the model's last layer's: its backward comes next)
    pre_backward   its output's gradient has arrived: wait for what its backward needs, prefetch for the layer before;
                   if that is the first one and needs nothing (an embedding), for its next forward, if one follows
    post_backward  two moments: the last gradient of a unit has been delivered (`gradients.py`), which starts its
                   reduction; and the layer's whole backward has run, after which its parameters are released

The backward events are hooks on autograd's nodes: one on the node of each layer's output, which ends the backward of
the layer after it and begins its own, and one on the node that made the first layer's input, if there is one. So a
layer with units must return a new tensor, never its input. For backward a layer saves only places in a sharded unit,
not its parameters (`saved.py`). A unit in which a layer saved nothing (the embedding's table) is not gathered for its
backward. A layer that is recomputed in its backward saves nothing before that, and needs all its units.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megazero.zero.gather import Gather
from megazero.zero.saved import before_backward, saved_places
from megazero.zero.unit import Unit

Layer = Callable[..., Tensor]


@dataclass(eq=False)
class _Call:
    """One call of a layer whose backward is still to come.

    Attributes:
        before: the call of the layer before it in the same forward.
        after: the call of the layer after it, until that one's backward has run.
        needed: the units whose parameters its backward needs.
    """

    gather: Gather
    units: list[Unit]
    before: "_Call | None"
    needed: list[Unit]
    after: "_Call | None" = None

    def pre_backward(self, _: object = None) -> None:
        """End the backward of the layer after; gather what this backward needs, and prefetch for the layer before."""
        if self.after is not None:
            self.after.post_backward()
            self.after = None  # breaks the reference cycle
        self.gather.unshard(self.needed)
        if self.before is not None:
            self.gather.prefetch(self.before.needed)
            if self.before.before is not None:
                self.gather.expect(self.before.before.needed)
        first = self.before or self
        if first.before is None and not first.needed:
            self.gather.prefetch(self.gather.following)

    def post_backward(self, _: object = None) -> None:
        """Release the layer's units, except those that the layer before needs."""
        self.gather.reshard(self.units, self.before.needed if self.before is not None else ())


class ShardedLayer:
    """A layer with hooks that gather its units before it runs and release them afterwards.

    Args:
        layer: takes the output of the layer before, and any further arguments.
        units: the units whose parameters it uses.
        before: the previous layer in forward order; None: this is the first.
        recomputed: its forward runs again in its backward, which then needs all its units.
        rests_whole: the parameters of all layers of the stage rest whole; nothing is prefetched or released.

    Attributes:
        before, after: the neighbours in forward order.
        keep: its units stay gathered after a forward that has a backward.
    """

    def __init__(
        self,
        layer: Layer,
        units: list[Unit],
        gather: Gather,
        before: "ShardedLayer | None",
        *,
        recomputed: bool,
        rests_whole: bool,
    ):
        self.layer, self.units, self._gather, self._recomputed = layer, units, gather, recomputed
        self.before, self.after = before, None
        if before is not None:
            before.after = self
        self.keep, self._rests_whole = False, rests_whole
        self._call: _Call | None = None

    def __call__(self, x: Tensor, *arguments: Any) -> Tensor:
        self._gather.unshard(self.units)
        if self._rests_whole:
            return self.layer(x, *arguments)
        next_units = self.after.units if self.after is not None else []
        self._gather.prefetch(next_units)
        if self.after is not None and self.after.after is not None:
            self._gather.expect(self.after.after.units)
        if torch.is_grad_enabled():
            return self._with_backward(x, arguments, next_units)
        y = self.layer(x, *arguments)
        self._gather.reshard(self.units, next_units)
        return y

    def _with_backward(self, x: Tensor, arguments: Sequence[Any], next_units: list[Unit]) -> Tensor:
        before = self.before._call if self.before is not None else None
        self._call = call = _Call(self._gather, self.units, before, list(self.units) if self._recomputed else [])
        if before is not None:
            before.after = call
        else:
            before_backward(x, call.post_backward)
        there = ((u, u.parameters.whole) for u in self.units if not u.parameters.rest_whole)
        gathered = {whole.untyped_storage()._cdata: unit for unit, whole in there if whole is not None}
        with saved_places(gathered, call.needed):
            y = self.layer(x, *arguments)
        if not self.keep:
            self._gather.reshard(self.units, next_units)
        before_backward(y, call.pre_backward)
        return y
