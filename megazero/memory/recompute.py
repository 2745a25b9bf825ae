"""Recompute activations when backward needs them, instead of keeping them (Chen et al. 2016, arXiv 1604.06174).

A recomputed layer runs forward without a graph, and only its input is kept, in an `ActivationStore`. In backward the
layer runs once more on that input, now with a graph, and backward goes through it at once. What a layer computes
depends on its input and its context alone (dropout masks are functions of names), so it computes the same again.

Of the second run only the graph is used, not the output: `LayerContext.recomputed` says so, and a block leaves out its
last matrix product, and the sum over the tensor axis that follows it. Of the six sums of a block that the ZeRO
paper counts (section 8: two forward, two again, two backward) one is gone.

The two grains of `memory.recompute`: *full* wraps whole blocks; *selective* wraps the core of attention, everything
between the projections (Korthikanti et al. 2022, arXiv 2205.05198, section 5), whose input is kept where it is.
"""

from collections.abc import Callable
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge


class LayerContext(Protocol):
    """The context of a micro-batch that a recomputed layer gets with its input (`model/batch_context.py`)."""

    def recomputed(self) -> Self:
        """Return the same context, marked as that of a recomputation, whose output nothing reads."""
        ...


class Kept:
    """The input of a layer, kept between forward and backward: by a reference here, in other ways in subclasses."""

    def __init__(self, x: Tensor):
        self._x = x

    def restore(self) -> Tensor:
        """Return the input, valid until `free`."""
        return self._x

    def free(self) -> None:
        """Free the input, which is not needed any more."""
        del self._x


ActivationStore = Callable[[Tensor], Kept]
Layer = Callable[[Tensor, Any], Tensor]


class Recomputed:
    """A layer whose backward runs its forward again.

    Args:
        layer: returns a new tensor; called with an input that has a gradient, and its context.
        store: keeps its input.
    """

    def __init__(self, layer: Layer, store: ActivationStore):
        self.layer, self.store = layer, store

    def __call__(self, x: Tensor, context: LayerContext) -> Tensor:
        if not torch.is_grad_enabled():
            return self.layer(x, context)
        return _Recompute.apply(x, self, context)

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """Return the output, which keeps no graph."""
        return self.layer(x, context)

    def backward(self, x: Tensor, grad: Tensor, context: LayerContext) -> Tensor | None:
        """Return the gradient of the input; deliver those of the parameters."""
        again = x.detach().requires_grad_()
        with torch.enable_grad():  # of the output only the place where backward begins is wanted
            root = get_gradient_edge(self.layer(again, context.recomputed()))
        torch.autograd.backward(root, grad)
        return again.grad


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, recomputed: Recomputed, context: LayerContext) -> Tensor:
        ctx.recomputed, ctx.context = recomputed, context
        y = recomputed.forward(x, context)
        ctx.kept = recomputed.store(x)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kept: Kept = ctx.kept
        grad = ctx.recomputed.backward(kept.restore(), grads[0], ctx.context)
        kept.free()
        del ctx.kept
        return grad, None, None
