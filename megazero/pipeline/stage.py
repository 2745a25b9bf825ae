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
        self, micro_batch: int, gradient: Tensor | None, run: Callable[..., None], **how: bool
    ) -> Tensor | None:
        """Run a backward, whole or its part for the input; return the gradient of the stage's input.

        That is None in the first stage.

        Args:
            gradient: of the stage's output; None in the last stage.
            run: `gradients.backward` or `gradients.backward_input`.
            how: the further arguments of `run`.
        """
        arrived, root = self._live.pop(micro_batch)
        run(micro_batch, lambda: torch.autograd.backward(root, gradient), **how)
        if arrived is None:
            return None
        assert len(arrived) == 1, f"the input of stage {self.index} has no gradient"
        return arrived[0]

    def clear(self) -> None:
        """Forget all micro-batches in flight."""
        self._live.clear()
