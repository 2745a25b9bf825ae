"""The life of a step: begin, one backward per micro-batch, finish.

The loss of a step is the sum over the valid tokens of the global batch divided by their count. The count is known
only when the last micro-batch has been seen, and nobody waits for it: backward runs on sum / (global batch x sequence
length), a constant, and the factor constant / count multiplies the unscaling that Adam does anyway. A step without a
valid token is skipped: it consumes its batch and changes nothing.

The ranks of the data axis see other samples. At the end of a step their gradients go to where the optimizer state is,
and the updated parameters come from there (`placement.py`). Under sequence parallelism a rank of the tensor axis has
seen only its own tokens of norms, biases and positions, which lie in the tails of the units; one all-reduce of each
tail completes them.

Nothing here makes the host wait. Whether a step went well is a flag on the device that suppresses the update there;
the host reads it later (`StepResult`). Once loss or norm were not finite the flag stays up, so no later update can
happen before the host has noticed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.kernels.operations import Operations
from megazero.parallel.collectives import all_reduce
from megazero.parallel.grid import Axis
from megazero.zero.clip import clip_factor, unit_squares
from megazero.zero.optimizer import AdamW
from megazero.zero.placement import STAGES, Stage, change, held
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


@dataclass(frozen=True, eq=False)
class Spread:
    """Over which ranks a step is spread.

    Attributes:
        data: ranks with other samples.
        tensor: ranks with other parts of the matrices.
        sequence: gradients of what is whole over the tensor axis are partial there.
        stage: what rests sharded over the data axis.
    """

    data: Axis
    tensor: Axis
    sequence: bool
    stage: Stage = STAGES[0]

    def shards(self, units: list[Unit]) -> list[slice]:
        """Of each unit the elements that this rank updates."""
        return [held(len(unit.parameters), self.stage.optimizer, self.data) for unit in units]


class Engine:
    """Gradients and update of one rank's units.

    Args:
        units: in forward order.
        optimizer: over the same units.
        clip: the largest global gradient norm let through; 0 for no clipping.
        tokens_per_step: global batch x sequence length, the constant that losses are divided by.
        spread: the ranks that share the step.
        ops: the kernels to use.
    """

    def __init__(
        self,
        units: list[Unit],
        optimizer: AdamW,
        *,
        clip: float,
        tokens_per_step: int,
        spread: Spread,
        ops: Operations,
    ):
        self.units, self.optimizer, self.spread, self.ops = units, optimizer, spread, ops
        self.clip, self.tokens_per_step = clip, tokens_per_step
        self._shards = list(zip(units, spread.shards(units), strict=True))
        device = units[0].parameters.device
        # Sum of losses and count of valid tokens: one tensor, so that both are summed over ranks at once. Counts are
        # exact in fp64 up to 2^53.
        self._totals = torch.zeros(2, dtype=torch.float64, device=device)
        self._halted = torch.zeros((), dtype=torch.bool, device=device)

    def begin_step(self) -> None:
        self._totals.zero_()
        for unit in self.units:
            unit.begin_step()

    def backward(self, losses_SB: Tensor, valid_SB: Tensor) -> None:
        """Adds one micro-batch: its token losses (0 where not valid) go into the step's loss and gradients."""
        self._totals[0] += losses_SB.detach().sum(dtype=torch.float64)
        self._totals[1] += valid_SB.sum()
        (losses_SB.sum() / self.tokens_per_step).backward()

    def finish_step(self, lr: float) -> StepResult:
        """Clips and updates, unless there is a reason not to."""
        spread, stage = self.spread, self.spread.stage
        for unit, ours in reversed(self._shards):
            unit.close_gradients()
            change(unit.gradients, stage.gradients, stage.optimizer, spread.data, "gradients")
            tail = unit.gradients[max(ours.start, unit.layout.tail) : ours.stop]
            if spread.sequence and len(tail):
                all_reduce(tail, spread.tensor, "tail")
        squares = unit_squares(self.units, stage.optimizer, self.ops, data=spread.data, tensor=spread.tensor)
        loss_sum, valid = all_reduce(self._totals, spread.data, "loss").unbind()
        factor = self.tokens_per_step / valid
        norm = squares.sum().sqrt() * factor
        loss = loss_sum / valid
        empty = valid == 0
        finite = (torch.isfinite(norm) & torch.isfinite(loss)) | empty
        self._halted |= ~finite
        skipped = self._halted | empty
        self.optimizer.update(lr=lr, scale=factor * clip_factor(norm, self.clip), skip=skipped)
        for unit in self.units:
            change(unit.parameters, stage.optimizer, stage.parameters, spread.data, "parameters")
        return StepResult(loss, norm, valid.to(torch.int64), skipped, finite, squares)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(full name, values of this rank's part) of every parameter, in unit order."""
        for unit in self.units:
            for interval in unit.layout.intervals:
                yield interval.name, unit.parameter(interval.name)
