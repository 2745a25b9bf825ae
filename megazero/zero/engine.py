"""The life of a step: begin, one backward per micro-batch, finish.

The loss of a step is the sum over the valid tokens of the global batch divided by their count. The count is known
only when the last micro-batch has been seen, and nobody waits for it: backward runs on sum / (global batch x sequence
length), a constant, and the factor constant / count multiplies the unscaling that Adam does anyway. A step without a
valid token is skipped: it consumes its batch and changes nothing.

Nothing here makes the host wait. Whether a step went well is a flag on the device that suppresses the update there;
the host reads it later (`StepResult`). Once loss or norm were not finite the flag stays up, so no later update can
happen before the host has noticed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.kernels.operations import Operations
from megazero.zero.clip import clip_factor, unit_squares
from megazero.zero.optimizer import AdamW
from megazero.zero.unit import Unit


@dataclass(frozen=True)
class StepResult:
    """What a step computed, still on the device.

    Attributes:
        loss: mean over valid tokens, nats; nan when there was none.
        grad_norm: of the gradient of that loss, before clipping.
        valid_tokens: their count.
        skipped: True when the update was suppressed.
        finite: False when loss or gradient norm were not finite although there were valid tokens.
        squares: sum of squared (scaled) gradients of each unit, fp64 [units].
    """

    loss: Tensor
    grad_norm: Tensor
    valid_tokens: Tensor
    skipped: Tensor
    finite: Tensor
    squares: Tensor


class Engine:
    """Gradients and update of one rank's units.

    Args:
        units: in forward order.
        optimizer: over the same units.
        clip: the largest global gradient norm let through; 0 for no clipping.
        tokens_per_step: global batch x sequence length, the constant that losses are divided by.
        ops: the kernels to use.
    """

    def __init__(self, units: list[Unit], optimizer: AdamW, *, clip: float, tokens_per_step: int, ops: Operations):
        self.units, self.optimizer, self.ops = units, optimizer, ops
        self.clip, self.tokens_per_step = clip, tokens_per_step
        device = units[0].parameters.device
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._valid = torch.zeros((), dtype=torch.int64, device=device)
        self._halted = torch.zeros((), dtype=torch.bool, device=device)

    def begin_step(self) -> None:
        self._loss_sum.zero_()
        self._valid.zero_()
        for unit in self.units:
            unit.begin_step()

    def backward(self, losses_SB: Tensor, valid_SB: Tensor) -> None:
        """Adds one micro-batch: its token losses (0 where not valid) go into the step's loss and gradients."""
        self._loss_sum += losses_SB.detach().sum(dtype=torch.float64)
        self._valid += valid_SB.sum()
        (losses_SB.sum() / self.tokens_per_step).backward()

    def finish_step(self, lr: float) -> StepResult:
        """Clips and updates, unless there is a reason not to."""
        for unit in self.units:
            unit.close_gradients()
        squares = unit_squares(self.units, self.ops)
        factor = self.tokens_per_step / self._valid.to(torch.float64)
        norm = squares.sum().sqrt() * factor
        loss = self._loss_sum / self._valid
        empty = self._valid == 0
        finite = (torch.isfinite(norm) & torch.isfinite(loss)) | empty
        self._halted |= ~finite
        skipped = self._halted | empty
        self.optimizer.update(lr=lr, scale=factor * clip_factor(norm, self.clip), skip=skipped)
        return StepResult(loss, norm, self._valid.clone(), skipped, finite, squares)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(full name, values of this rank's part) of every parameter, in unit order."""
        for unit in self.units:
            for interval in unit.layout.intervals:
                yield interval.name, unit.parameter(interval.name)
