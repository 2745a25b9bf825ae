"""One stage of the model as its rank runs it: forward of a micro-batch, and later its backward, whole or in two parts.

Between the two a stage keeps its input and the place in autograd's graph where backward begins; its output is the next
stage's. The last stage's output are the token losses, and its backward begins at their sum.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

Feed = Any  # what a stage has to know of a micro-batch; the pipeline only hands it on
Run = Callable[[Tensor | None, Feed], Tensor]


class Passes(Protocol):
    """Who looks after parameters and gradients of a stage (`zero/passes.py`)."""

    def forward(self, micro_batch: int) -> None: ...

    def backward(self, micro_batch: int, begin: Callable[[], None], *, reduce: bool) -> None: ...

    def backward_input(self, micro_batch: int, begin: Callable[[], None]) -> None: ...

    def backward_weight(self, micro_batch: int, *, reduce: bool) -> None: ...

    def finish_reduction(self) -> None: ...


class Stage:
    """
    Args:
        index: of the stage.
        run: its parts of the model: (output of the stage before, feed) -> output; the first gets None.
        passes: of its units.
        loss: (token losses, feed) -> what backward begins at; None for all but the last.
    """

    def __init__(self, index: int, run: Run, passes: Passes, loss: Callable[[Tensor, Feed], Tensor] | None):
        self.index, self.run, self.passes, self.loss = index, run, passes, loss
        self._live: dict[int, tuple[Tensor | None, Tensor | GradientEdge]] = {}

    def forward(self, micro_batch: int, x: Tensor | None, feed: Feed) -> Tensor:
        """The output, without its graph."""
        if not torch.is_grad_enabled():
            return self.run(x, feed)
        self.passes.forward(micro_batch)
        if x is not None:
            x.requires_grad_()
        y = self.run(x, feed)
        # The output itself need not be kept, only where it came from.
        self._live[micro_batch] = x, get_gradient_edge(y) if self.loss is None else self.loss(y, feed)
        return y.detach()

    def backward(self, micro_batch: int, gradient: Tensor | None, *, reduce: bool) -> Tensor | None:
        """The gradient of the stage's input, None in the first stage.

        Args:
            gradient: of its output; None in the last stage.
            reduce: it is followed by a reduction of the gradients.
        """
        x, begin = self._begin(micro_batch, gradient)
        self.passes.backward(micro_batch, begin, reduce=reduce)
        return self._gradient(x)

    def backward_input(self, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        """The same without the weights' gradients, which `backward_weight` computes later."""
        x, begin = self._begin(micro_batch, gradient)
        self.passes.backward_input(micro_batch, begin)
        return self._gradient(x)

    def backward_weight(self, micro_batch: int, *, reduce: bool) -> None:
        self.passes.backward_weight(micro_batch, reduce=reduce)

    def finish_reduction(self) -> None:
        self.passes.finish_reduction()

    def clear(self) -> None:
        """Nothing is under way."""
        self._live.clear()

    def _begin(self, micro_batch: int, gradient: Tensor | None) -> tuple[Tensor | None, Callable[[], None]]:
        x, root = self._live.pop(micro_batch)
        return x, lambda: torch.autograd.backward(root, gradient)

    def _gradient(self, x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        gradient, x.grad = x.grad, None
        assert gradient is not None, f"the input of stage {self.index} has no gradient"
        return gradient
