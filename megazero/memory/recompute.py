"""Recompute activations when backward needs them, instead of keeping them (Chen et al. 2016, arXiv 1604.06174).

A recomputed layer runs forward without an autograd graph and keeps only its input, in an `ActivationStore`. In backward
it runs again on that input, with a graph, and backward goes through the graph at once. A layer's output depends only on
its input and context (dropout masks are functions of names), so both runs give equal results.

Only the graph of the second run is used, not its output: `LayerContext.recomputed` marks it, and a block then omits its
last matrix product and the sum over the tensor axis that follows. So of the six sums of a block that the ZeRO paper
counts (section 8: two in forward, two in recomputation, two in backward) one is saved.

The two modes of `memory.recompute`: *full* wraps whole blocks; *selective* wraps the core of attention, everything
between the projections (Korthikanti et al. 2022, arXiv 2205.05198, section 5), and keeps its input in place.
"""

from collections.abc import Callable
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge


class LayerContext(Protocol):
    """The context of a micro-batch, an argument of a recomputed layer (`model/batch_context.py`)."""

    def recomputed(self) -> Self:
        """Return a copy of the context that marks a recomputation, whose output is not used."""
        ...


class Kept:
    """The input of a layer, kept between forward and backward: here by reference; subclasses copy it."""

    def __init__(self, x: Tensor):
        self._x = x

    def restore(self) -> Tensor:
        """Return the input, valid until `free`."""
        return self._x

    def free(self) -> None:
        """Free the input after its last use."""
        del self._x


ActivationStore = Callable[[Tensor], Kept]
Layer = Callable[[Tensor, Any], Tensor]


class Recomputed:
    """A layer whose backward runs its forward again.

    Args:
        layer: returns a new tensor; called with an input that requires a gradient, and its context.
        store: keeps its input.
    """

    def __init__(self, layer: Layer, store: ActivationStore):
        self.layer, self.store = layer, store

    def __call__(self, x: Tensor, context: LayerContext) -> Tensor:
        if not torch.is_grad_enabled():
            return self.layer(x, context)
        return _Recompute.apply(x, self, context)

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """Return the layer's output. Autograd's forward calls it, with grad mode off, so the output has no graph."""
        return self.layer(x, context)

    def backward(self, x: Tensor, grad: Tensor, context: LayerContext) -> Tensor | None:
        """Return the gradient of the input; deliver the parameters' gradients."""
        again = x.detach().requires_grad_()
        with torch.enable_grad():  # keep only the output's graph edge, where backward begins, not the output
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
