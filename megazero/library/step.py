"""Hold the results of a step of a sharded module."""

from dataclasses import dataclass
from functools import cached_property

from megazero.zero.engine import StepNumbers, StepResult


@dataclass(frozen=True)
class Step:
    """The results of a step; reading one waits for the device.

    Attributes:
        result: as the engine has it, on the device.
    """

    result: StepResult

    @cached_property
    def numbers(self) -> StepNumbers:
        """Return all of them on the host."""
        return StepNumbers.of(self.result.packed.tolist())

    @property
    def grad_norm(self) -> float:
        """Return the norm of the step's gradient over all ranks, before clipping."""
        return self.numbers.grad_norm

    @property
    def skipped(self) -> bool:
        """Return whether nothing was updated, because the gradient was not finite."""
        return self.numbers.skipped

    @property
    def loss(self) -> float:
        """Return the mean over the ranks of the sum of the step's losses."""
        return self.numbers.loss
