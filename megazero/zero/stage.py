"""Manage the gradients of one pipeline stage through the forward and backward of each micro-batch.

Backward can be split in two (Qi et al. 2023, arXiv 2401.10241, section 2). The first half computes the gradient of the
stage's input, for which the stage before waits; every weight gradient, a matrix product or a sum, is deferred instead
of computed (`gradients.py`). The second half computes the deferred ones in the same order, so the sums are the same bit
for bit.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from megazero.zero.gather import Gather
from megazero.zero.reduce import Reduction
from megazero.zero.unit import Unit


class StageGradients:
    """The gradients of the units of one stage, from forward to reduction.

    Args:
        units: all units that the stage uses.
        reduction: reduces the units whose gradients are complete when this stage's are.

    Attributes:
        first_units: the units that its first layer uses, for which a forward waits.
    """

    def __init__(self, units: list[Unit], reduction: Reduction, gather: Gather):
        self.units, self.reduction, self._gather = units, reduction, gather
        self.first_units: list[Unit] = []
        self._deferred: dict[int, deque[Callable[[], None]]] = {}

    def clear(self) -> None:
        """Drop the deferred gradients and clear the reduction."""
        self._deferred.clear()
        self.reduction.clear()

    def forward(self, micro_batch: int) -> None:
        """Begin the forward of a micro-batch (counted from 0): uses announced until the next call belong to it."""
        for unit in self.units:
            unit.gradients.deliveries.micro_batch = micro_batch

    def backward(
        self, micro_batch: int, begin: Callable[[], None], *, reduce: bool, last: bool, forward_follows: bool = False
    ) -> None:
        """Compute the gradients of input and units; start to reduce each unit's gradients when they are complete.

        Gathered parameters are freed at the end.

        Args:
            begin: runs autograd.
            reduce: reduce the gradients of this micro-batch and of those before it.
            last: it is the last micro-batch of the step.
            forward_follows: the next computation of this rank, apart from weight gradients, is a forward of this stage;
                its first units stay gathered.
        """
        self._deliver(micro_batch, reduce, last)
        with self._gathering(forward_follows):
            begin()
            self.reduction.end_backward()

    def backward_input(self, micro_batch: int, begin: Callable[[], None], *, forward_follows: bool = False) -> None:
        """Compute the gradient of the input; defer those of the units. For the arguments see `backward`."""
        deferred = self._deferred[micro_batch] = deque()
        self.forward(micro_batch)
        for unit in self.units:
            unit.gradients.deliveries.deferred = deferred
        with self._gathering(forward_follows):
            begin()
        for unit in self.units:
            unit.gradients.deliveries.deferred = None

    def backward_weight(self, micro_batch: int, *, reduce: bool, last: bool) -> None:
        """Compute the gradients that `backward_input` has deferred. For the arguments see `backward`."""
        self._deliver(micro_batch, reduce, last)
        deferred = self._deferred.pop(micro_batch)
        with torch.no_grad():
            while deferred:
                deferred.popleft()()  # frees the tensors that it held
        self.reduction.end_backward()

    def finish_reduction(self) -> None:
        """Wait until the reduced gradients are where the optimizer state is."""
        self.reduction.finish()

    @contextmanager
    def _gathering(self, forward_follows: bool) -> Iterator[None]:
        """Enclose a backward; at its end free all units except those of a forward that follows."""
        self._gather.following = self.first_units if forward_follows else []
        yield
        self._gather.reshard_all(self.units)
        self._gather.following = []

    def _deliver(self, micro_batch: int, reduce: bool, last: bool) -> None:
        self.forward(micro_batch)
        self.reduction.begin_backward(reduce=reduce, last=last)
