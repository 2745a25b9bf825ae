"""The life of a step: begin, forward and backward of each micro-batch, finish.

The loss of a step is the sum over the valid tokens of the global batch divided by their count. The count is known
only when the last micro-batch has been seen, and nobody waits for it: backward runs on sum / (global batch x sequence
length), a constant, and the factor constant / count multiplies the unscaling that Adam does anyway. A step without a
valid token is skipped: it consumes its batch and changes nothing.

The ranks of the data axis see other samples. Their gradients go to where the optimizer state is (`reduction.py`), and
the updated parameters come from there (`presence.py`). Under sequence parallelism a rank of the tensor axis has
seen only its own tokens of norms, biases and positions, which lie in the tails of the units; one all-reduce of each
reduced tail completes them.

Nothing here makes the host wait. Whether a step went well is a flag on the device that suppresses the update there;
the host reads it later (`StepResult`). Once loss or norm were not finite the flag stays up, so no later update can
happen before the host has noticed; only with a loss scale (fp16) it is an ordinary event, and training goes on.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.kernels.operations import Operations
from megazero.parallel.collectives import all_reduce, start_all_reduce
from megazero.zero.clip import clip_factor, unit_squares
from megazero.zero.optimizer import AdamW
from megazero.zero.placement import Spread
from megazero.zero.presence import Presence
from megazero.zero.reduction import Reduction
from megazero.zero.scaler import LossScale
from megazero.zero.unit import Unit
from megazero.zero.watch import Part, watch


@dataclass(frozen=True)
class StepResult:
    """What a step computed, still on the device.

    Attributes:
        loss: mean over valid tokens, nats; nan when there was none.
        grad_norm: of the gradient of that loss, before clipping.
        valid_tokens: their count.
        skipped: True when the update was suppressed.
        finite: False when loss or gradient norm were not finite although there were valid tokens.
        loss_scale: that the gradients were computed with.
        squares: sum of squared (scaled) gradients of each unit, fp64 [units].
    """

    loss: Tensor
    grad_norm: Tensor
    valid_tokens: Tensor
    skipped: Tensor
    finite: Tensor
    loss_scale: Tensor
    squares: Tensor


class Engine:
    """Parameters, gradients and update of one rank's units.

    Args:
        units: in forward order.
        optimizer: over the same units.
        clip: the largest global gradient norm let through; 0 for no clipping.
        tokens_per_step: global batch x sequence length, the constant that losses are divided by.
        spread: the ranks that share the step.
        scaling: whether losses are scaled, as fp16 needs.
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
        scaling: bool,
        ops: Operations,
    ):
        self.units, self.optimizer, self.spread, self.ops = units, optimizer, spread, ops
        self.clip, self.tokens_per_step = clip, tokens_per_step
        device = units[0].parameters.device
        self.presence = Presence(spread.data, device)
        self.loss_scale = LossScale(device, dynamic=scaling)
        self._reduction = Reduction(units, spread, device)
        self._micro_batches = 1
        # Sum of losses and count of valid tokens: one tensor, so that both are summed over ranks at once. Counts are
        # exact in fp64 up to 2^53.
        self._totals = torch.zeros(2, dtype=torch.float64, device=device)
        self._halted = torch.zeros((), dtype=torch.bool, device=device)

    def watch(self, parts: Sequence[Part], names: Sequence[list[str]]) -> list[Part]:
        """The parts of a model, each with what has to be done around it; `names` of the units that each uses."""
        units = {unit.layout.name: unit for unit in self.units}
        return watch(parts, [[units[name] for name in of_part] for of_part in names], self.presence)

    def begin_step(self, micro_batches: int = 1) -> None:
        """A step of this many micro-batches begins."""
        self._micro_batches = micro_batches
        self._totals.zero_()
        self._reduction.begin_step()

    def forward(self, micro_batch: int) -> None:
        """What is computed from here on, until the next call, belongs to this micro-batch (counted from 0)."""
        for unit in self.units:
            unit.visits.forward = micro_batch

    def backward(self, losses_SB: Tensor, valid_SB: Tensor, micro_batch: int = 0) -> None:
        """Adds one micro-batch: its token losses (0 where not valid) go into the step's loss and gradients."""
        self._totals[0] += losses_SB.detach().sum(dtype=torch.float64)
        self._totals[1] += valid_SB.sum()
        self._reduction.begin_backward(micro_batch, last=micro_batch == self._micro_batches - 1)
        self._run_backward(losses_SB)

    def finish_step(self, lr: float) -> StepResult:
        """Clips and updates, unless there is a reason not to."""
        spread = self.spread
        self._complete_tails()
        squares = unit_squares(self.units, spread, self.ops)
        loss_sum, valid = all_reduce(self._totals, spread.data, "loss").unbind()
        loss_scale = self.loss_scale.scale.clone()
        factor = self.tokens_per_step / valid / loss_scale
        norm = squares.sum().sqrt() * factor
        loss = loss_sum / valid
        empty = valid == 0
        finite = (torch.isfinite(norm) & torch.isfinite(loss)) | empty
        if not self.loss_scale.dynamic:
            self._halted |= ~finite
        skipped = self._halted | empty | ~finite
        self.loss_scale.update(finite, counts=~empty)
        scale, skip = factor * clip_factor(norm, self.clip), skipped.to(torch.float32)
        for unit in self.units:
            self.optimizer.update(unit, lr=lr, scale=scale, skip=skip)
            self.presence.publish(unit)
        return StepResult(loss, norm, valid.to(torch.int64), skipped, finite, loss_scale, squares)

    def examine(self, losses: Callable[[int], Tensor], micro_batches: int, loss_scale: Tensor) -> str | None:
        """Computes a step again, without reducing or updating anything: what of this rank's is not finite, if anything.

        A step that was not finite has changed nothing, so it can be repeated bit for bit, and now each rank's own loss
        and gradients can be looked at before they are added to those of others. Every rank has to call this.

        Args:
            losses: micro-batch -> token losses [S, B].
            loss_scale: that the step had.
        """
        faults: list[str] = []
        self.loss_scale.scale.copy_(loss_scale)
        self.begin_step(micro_batches)
        for m in range(micro_batches):
            self.forward(m)
            losses_SB = losses(m)
            if not torch.isfinite(losses_SB).all():
                faults.append(f"loss of micro-batch {m}")
            self._reduction.begin_backward(m, last=False, inspect=lambda unit: faults.extend(_not_finite(unit)))
            self._run_backward(losses_SB)
        return faults[0] if faults else None

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(full name, values of this rank's part) of every parameter, in unit order; gathered if need be.

        Values are views that are good until the next one is asked for. Every rank of the data axis has to go through
        all of them.
        """
        for unit in self.units:
            self.presence.need([unit])
            for interval in unit.layout.intervals:
                yield interval.name, unit.parameter(interval.name)
            self.presence.release([unit])

    def _run_backward(self, losses_SB: Tensor) -> None:
        self.loss_scale.scaled(losses_SB.sum() / self.tokens_per_step).backward()
        self._reduction.end_backward()
        self.presence.release_all(self.units)

    def _complete_tails(self) -> None:
        if not self.spread.sequence:
            return
        under_way = []
        for unit in reversed(self.units):
            tail = unit.own_gradients[max(0, unit.layout.tail - unit.shard.start) :]
            if len(tail):
                under_way.append(start_all_reduce(tail, self.spread.tensor, "tail"))
        for pending in under_way:
            pending.wait()


def _not_finite(unit: Unit) -> list[str]:
    """The parameters of a unit whose own gradients hold something that is not finite."""
    return [f"gradient of {name}" for name, view in unit.views.items() if not torch.isfinite(view.view).all()]
