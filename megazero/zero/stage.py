"""Forward and backward passes of one stage of the model, as its units see them.

Backward can be split in two (Qi et al. 2023, arXiv 2401.10241, section 2): the input's part computes what the stage
before waits for; every gradient that is delivered meanwhile, a matrix product or a sum, is noted instead of computed
(`gradients.py`) and done in the weights' part, in the same order, so the sums are the same bit for bit.
"""

from collections import deque
from collections.abc import Callable

import torch

from megazero.zero.gather import Gather
from megazero.zero.reduce import Reduction
from megazero.zero.unit import Unit


class StageGradients:
    """The gradients of the units of one stage, from forward to reduction.

    Args:
        units: that the stage uses.
        reduction: of those whose gradients are complete when this stage's are.
    """

    def __init__(self, units: list[Unit], reduction: Reduction, gather: Gather):
        self.units, self.reduction, self._gather = units, reduction, gather
        self._deferred: dict[int, deque[Callable[[], None]]] = {}

    def clear(self) -> None:
        """Forget what was under way."""
        self._deferred.clear()
        self.reduction.clear()

    def forward(self, micro_batch: int) -> None:
        """Begin a micro-batch (counted from 0): uses announced from here on, until the next call, are its."""
        self._enter(micro_batch)

    def backward(self, micro_batch: int, begin: Callable[[], None], *, reduce: bool, last: bool) -> None:
        """Compute gradients of the units, and begin to reduce them where they are to be.

        Args:
            begin: runs autograd.
            reduce: they are.
            last: it is the last micro-batch of the step.
        """
        self._deliver(micro_batch, reduce, last)
        begin()
        self.reduction.end_backward()
        self._gather.reshard_all(self.units)

    def backward_input(self, micro_batch: int, begin: Callable[[], None]) -> None:
        """Compute gradients of the input; those of the units are deferred."""
        deferred = self._deferred[micro_batch] = deque()
        self._enter(micro_batch)
        for unit in self.units:
            unit.deliveries.deferred = deferred
        begin()
        for unit in self.units:
            unit.deliveries.deferred = None
        self._gather.reshard_all(self.units)

    def backward_weight(self, micro_batch: int, *, reduce: bool, last: bool) -> None:
        """Compute what `backward_input` has deferred."""
        self._deliver(micro_batch, reduce, last)
        deferred = self._deferred.pop(micro_batch)
        with torch.no_grad():
            while deferred:
                deferred.popleft()()  # what it held on to is free then
        self.reduction.end_backward()

    def finish_reduction(self) -> None:
        """Wait until the reduced gradients are where the optimizer state is."""
        self.reduction.finish()

    def _enter(self, micro_batch: int) -> None:
        for unit in self.units:
            unit.deliveries.micro_batch = micro_batch

    def _deliver(self, micro_batch: int, reduce: bool, last: bool) -> None:
        self._enter(micro_batch)
        self.reduction.begin_backward(reduce=reduce, last=last)
