"""Recompute activations when backward needs them, instead of keeping them (Chen et al. 2016, arXiv 1604.06174).

A recomputed part of the model runs forward without a graph, and only its input is kept, as an `ActivationStore` does
that. In backward the part runs once more on that input, now with a graph, and backward goes through it at once. What a
part does depends on its input and its circumstances alone (dropout masks are functions of names), so it does the same
again.

Of the second run only the graph is used, not the output: `Circumstances.recomputed` says so, and a block leaves its
last matrix product out, with the sum over the tensor axis that follows it. Of the six sums of a block that the ZeRO
paper counts (section 8: two forward, two again, two backward) one is gone.

The two grains of `memory.recompute`: *full* wraps whole blocks; *selective* wraps the core of attention, everything
between the projections (Korthikanti et al. 2022, arXiv 2205.05198, section 5), whose input is kept where it is.
"""

from collections.abc import Callable
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge


class Circumstances(Protocol):
    """The circumstances that a recomputed part gets beside its input."""

    def recomputed(self) -> Self:
        """Return the same for a recomputation, whose output nothing reads."""
        ...


class Kept(Protocol):
    """A part's input, kept between forward and backward."""

    def restore(self) -> Tensor:
        """Return the input, good until `free`."""
        ...

    def free(self) -> None:
        """Free the input, which is not needed any more."""
        ...


class ActivationStore(Protocol):
    """A way to keep inputs."""

    def keep(self, x: Tensor) -> Kept: ...


class PlainStore:
    """A store that keeps a reference to the tensor."""

    def __init__(self, x: Tensor):
        self._x = x

    @classmethod
    def keep(cls, x: Tensor) -> "PlainStore":
        return cls(x)

    def restore(self) -> Tensor:
        return self._x

    def free(self) -> None:
        del self._x


Layer = Callable[[Tensor, Any], Tensor]


class Recomputed:
    """A part of the model whose backward runs it again.

    Args:
        part: returns a new tensor; called with an input that has a gradient, and its circumstances.
        store: keeps its input.
    """

    def __init__(self, part: Layer, store: ActivationStore | type[PlainStore]):
        self._part, self._store = part, store

    def __call__(self, x: Tensor, circumstances: Circumstances) -> Tensor:
        if not torch.is_grad_enabled():
            return self._part(x, circumstances)
        return _Replay.apply(x, self._part, self._store, circumstances)


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Layer, store: ActivationStore, circumstances: Circumstances) -> Tensor:
        ctx.part, ctx.circumstances = part, circumstances
        y = part(x, circumstances)
        ctx.kept = store.keep(x)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kept: Kept = ctx.kept
        x = kept.restore().detach().requires_grad_()
        with torch.enable_grad():  # of the output only the place where backward begins is wanted
            root = get_gradient_edge(ctx.part(x, ctx.circumstances.recomputed()))
        torch.autograd.backward(root, grads[0])
        kept.free()
        del ctx.kept
        return x.grad, None, None, None
