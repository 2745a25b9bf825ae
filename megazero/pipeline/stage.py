"""One stage of the model as its rank runs it: forward of a micro-batch, and later its backward, whole or in two parts.

Between the two a stage keeps the place in autograd's graph where backward begins; its output is the next stage's, and
its input is kept by whatever needs it. The last stage's output are the token losses, and its backward begins at their
sum.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

StageInputs = Any  # what a stage has to know of a micro-batch; the pipeline only hands it on
Run = Callable[[Tensor | None, StageInputs], Tensor]


class StageGradients(Protocol):
    """The manager of a stage's parameters and gradients (`zero/stage.py`)."""

    def forward(self, micro_batch: int) -> None:
        """Begin the forward of a micro-batch."""

    def backward(
        self, micro_batch: int, begin: Callable[[], None], *, reduce: bool, last: bool, forward_follows: bool
    ) -> None:
        """Run a backward.

        Args:
            begin: runs it.
            reduce: gradients are complete after it and are reduced.
            last: it is the last of the step.
            forward_follows: a forward of this stage comes next.
        """

    def backward_input(self, micro_batch: int, begin: Callable[[], None], *, forward_follows: bool) -> None:
        """Run the part of a backward that computes the input's gradient."""

    def backward_weight(self, micro_batch: int, *, reduce: bool, last: bool) -> None:
        """Run the part of a backward that computes the weights' gradients."""

    def finish_reduction(self) -> None:
        """Wait for the reductions under way."""


class _Input(torch.autograd.Function):
    """The identity at a stage's beginning, which takes the gradient of the stage's input out of backward.

    A leaf would be kept until backward. `root` has no elements, and makes the graph begin here.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, root: Tensor, arrived: list[Tensor]) -> Tensor:
        ctx.arrived = arrived
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        ctx.arrived.append(grads[0])
        return None, None, None


class Stage:
    """One stage of the model on its rank.

    Args:
        index: number of the stage.
        run: its parts of the model: (output of the stage before, feed) -> output; the first gets None.
        gradients: gather parameters and reduce gradients of its units.
        loss: (token losses, feed) -> what backward begins at; None for all but the last.
    """

    def __init__(
        self, index: int, run: Run, gradients: StageGradients, loss: Callable[[Tensor, StageInputs], Tensor] | None
    ):
        self.index, self.run, self.gradients, self.loss = index, run, gradients, loss
        # Of each micro-batch: where the input's gradient will be, None in the first stage; where backward begins.
        self._live: dict[int, tuple[list[Tensor] | None, Tensor | GradientEdge]] = {}
        self._root = torch.empty(0, requires_grad=True)

    def forward(self, micro_batch: int, x: Tensor | None, feed: StageInputs) -> Tensor:
        """Run forward, and return the output without its graph."""
        if not torch.is_grad_enabled():
            return self.run(x, feed)
        self.gradients.forward(micro_batch)
        arrived: list[Tensor] | None = None
        if x is not None:
            arrived = []
            x = _Input.apply(x, self._root, arrived)
        y = self.run(x, feed)
        # The output itself need not be kept, only where it came from.
        self._live[micro_batch] = arrived, get_gradient_edge(y) if self.loss is None else self.loss(y, feed)
        return y.detach()

    def backward(
        self, micro_batch: int, gradient: Tensor | None, *, reduce: bool, last: bool, forward_follows: bool
    ) -> Tensor | None:
        """Run backward, and return the gradient of the stage's input, None in the first stage.

        Args:
            gradient: of its output; None in the last stage.
            reduce: this backward is followed by a reduction of the gradients.
            last: it is the step's last micro-batch.
            forward_follows: what this rank computes next, but for weight gradients, is a forward of this stage.
        """
        arrived, begin = self._begin(micro_batch, gradient)
        self.gradients.backward(micro_batch, begin, reduce=reduce, last=last, forward_follows=forward_follows)
        return self._gradient(arrived)

    def backward_input(self, micro_batch: int, gradient: Tensor | None, *, forward_follows: bool) -> Tensor | None:
        """Run backward without the weights' gradients, which `backward_weight` computes later."""
        arrived, begin = self._begin(micro_batch, gradient)
        self.gradients.backward_input(micro_batch, begin, forward_follows=forward_follows)
        return self._gradient(arrived)

    def backward_weight(self, micro_batch: int, *, reduce: bool, last: bool) -> None:
        """Compute the weights' gradients of a micro-batch."""
        self.gradients.backward_weight(micro_batch, reduce=reduce, last=last)

    def finish_reduction(self) -> None:
        """Wait for the reductions under way."""
        self.gradients.finish_reduction()

    def clear(self) -> None:
        """Forget the micro-batches that are under way."""
        self._live.clear()

    def _begin(self, micro_batch: int, gradient: Tensor | None) -> tuple[list[Tensor] | None, Callable[[], None]]:
        arrived, root = self._live.pop(micro_batch)
        return arrived, lambda: torch.autograd.backward(root, gradient)

    def _gradient(self, arrived: list[Tensor] | None) -> Tensor | None:
        if arrived is None:
            return None
        assert len(arrived) == 1, f"the input of stage {self.index} has no gradient"
        return arrived[0]
