"""Run one stage of the model: the forward of a micro-batch, and later its backward, whole or in two parts.

Between the two a stage keeps only the edge of the autograd graph where backward begins: the next stage has the output,
and layers keep the input if they need it. The last stage's output is the token losses, and its backward begins at their
sum.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

StageInputs = Any  # the inputs of a stage for a micro-batch, other than activations; the pipeline only passes them on
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
            begin: runs autograd's backward.
            reduce: reduce the gradients, which are complete after this backward.
            last: this is the last backward of the step.
            forward_follows: a forward of this stage comes next.
        """

    def backward_input(self, micro_batch: int, begin: Callable[[], None], *, forward_follows: bool) -> None:
        """Run the part of a backward that computes the input's gradient."""

    def backward_weight(self, micro_batch: int, *, reduce: bool, last: bool) -> None:
        """Run the part of a backward that computes the weights' gradients."""

    def finish_reduction(self) -> None:
        """Wait for the reductions under way."""


class _Input(torch.autograd.Function):
    """The identity at the start of a stage, whose backward captures the gradient of the stage's input.

    A leaf tensor instead would keep the input's memory until backward. `root`, without elements, starts the graph here.
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
        index: index of the stage.
        run: runs its layers: (output of the previous stage, feed) -> output; the first stage gets None.
        gradients: gathers parameters and reduces gradients of its units.
        loss: (token losses, feed) -> the loss on which backward runs; None for all stages but the last.
    """

    def __init__(
        self, index: int, run: Run, gradients: StageGradients, loss: Callable[[Tensor, StageInputs], Tensor] | None
    ):
        self.index, self.run, self.gradients, self.loss = index, run, gradients, loss
        # By micro-batch: (list that receives the input's gradient, None in the first stage; start of backward).
        self._live: dict[int, tuple[list[Tensor] | None, Tensor | GradientEdge]] = {}
        self._root = torch.empty(0, requires_grad=True)

    def forward(self, micro_batch: int, x: Tensor | None, feed: StageInputs) -> Tensor:
        """Run forward; return the output without its graph."""
        if not torch.is_grad_enabled():
            return self.run(x, feed)
        self.gradients.forward(micro_batch)
        arrived: list[Tensor] | None = None
        if x is not None:
            arrived = []
            x = _Input.apply(x, self._root, arrived)
        y = self.run(x, feed)
        # Keep only the output's graph edge, not the output itself.
        self._live[micro_batch] = arrived, get_gradient_edge(y) if self.loss is None else self.loss(y, feed)
        return y.detach()

    def backward(
        self, micro_batch: int, gradient: Tensor | None, *, reduce: bool, last: bool, forward_follows: bool
    ) -> Tensor | None:
        """Run backward; return the gradient of the stage's input, None in the first stage.

        Args:
            gradient: of the stage's output; None in the last stage.
            reduce: reduce the gradients after this backward.
            last: this is the step's last micro-batch.
            forward_follows: this rank's next pass, apart from weight gradients, is a forward of this stage.
        """
        arrived, begin = self._begin(micro_batch, gradient)
        self.gradients.backward(micro_batch, begin, reduce=reduce, last=last, forward_follows=forward_follows)
        return self._gradient(arrived)

    def backward_input(self, micro_batch: int, gradient: Tensor | None, *, forward_follows: bool) -> Tensor | None:
        """Run backward without the weights' gradients, which `backward_weight` computes later; return as `backward`."""
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
        """Forget all micro-batches in flight."""
        self._live.clear()

    def _begin(self, micro_batch: int, gradient: Tensor | None) -> tuple[list[Tensor] | None, Callable[[], None]]:
        arrived, root = self._live.pop(micro_batch)
        return arrived, lambda: torch.autograd.backward(root, gradient)

    def _gradient(self, arrived: list[Tensor] | None) -> Tensor | None:
        if arrived is None:
            return None
        assert len(arrived) == 1, f"the input of stage {self.index} has no gradient"
        return arrived[0]
