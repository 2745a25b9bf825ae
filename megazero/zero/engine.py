"""Run a step: begin it, gather and reduce around each micro-batch's forward and backward, clip and update.

The loss of a step is the sum over the valid tokens of the global batch divided by their count. The count is known
only after the last micro-batch, but backward does not wait for it: backward runs on sum / (global batch x sequence
length), a constant, and the factor constant / count is multiplied into the unscaling in the update. A step without a
valid token is skipped: it consumes its batch and changes nothing.

The ranks of the data axis see different samples. Their gradients are reduced to where the optimizer state is
(`reduce.py`), and the updated parameters are gathered from there (`gather.py`). Under sequence parallelism, a tensor
rank's gradients of norms, biases and positions, which are at the end of each unit (`tp_replicated`), cover only its own
tokens; one all-reduce of that part of the reduced gradients completes them. Pipeline ranks have different stages of the
model; the last stage computes the loss. A weight that the first and the last stage share has a copy on both, each with
the gradient of its own use: `reduce_tied` sums these, so that both copies get the same update; the norm counts one.

The host does not wait here, unless it does the update itself. A flag on the device suppresses the update of a step that
failed; the host reads it later (`StepResult`). Once the loss or the norm is not finite, the flag stays set, so no later
update can happen before the host has noticed. Only with a loss scale (fp16) is this an ordinary event, after which
training goes on. All ranks have the same flag, even if only one rank's copy of the reduced gradients is not finite: the
sum over all ranks then includes its sum of squares.

The votes of the ranks in a step are summed together with the loss, before the update: a sum after the update would wait
for the gathers of parameters that follow each unit's update.
"""

import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megazero.comm.collectives import all_reduce
from megazero.comm.grid import Grid
from megazero.comm.readback import Readback
from megazero.kernels.operations import Operations
from megazero.optim.clip import clip_factor, only_odd, unit_squares
from megazero.optim.delayed import Delayed
from megazero.optim.loss_scale import LossScale
from megazero.optim.optimizer import Optimizer
from megazero.plan.optimizers import AVERAGE
from megazero.zero.extension import Extension
from megazero.zero.gather import Gather
from megazero.zero.hooks import Layer, ShardedLayer
from megazero.zero.offload import Offload
from megazero.zero.reduce import Reduction, sum_copies, sum_tails
from megazero.zero.stage import StageGradients
from megazero.zero.unit import Unit

_AT_ONCE = 1 << 20  # elements that are exchanged with their averages at a time
VOTES = 8  # votes of a rank in a step, each on a question of its own


class StepNumbers(NamedTuple):
    """The results of a step on the host; see `StepResult`."""

    loss: float
    grad_norm: float
    loss_scale: float
    finite: bool
    skipped: bool
    votes: list[float]

    @classmethod
    def of(cls, packed: Sequence[float]) -> "StepNumbers":
        """Return the numbers of a step from the values of `StepResult.packed`."""
        loss, norm, scale, finite, skipped, *votes = packed
        return cls(loss, norm, scale, bool(finite), bool(skipped), votes)


@dataclass(frozen=True)
class StepResult:
    """The results of a step, still on the device.

    Attributes:
        loss: mean over valid tokens, nats; nan if there was no valid token.
        grad_norm: norm of the gradient of that loss, before clipping.
        skipped: True if the update was suppressed.
        finite: False if loss or gradient norm were not finite although there were valid tokens.
        loss_scale: the scale with which the gradients were computed.
        squares: sums of squared (scaled) gradients: of each unit, and in it of each norm of clipping; fp64.
        applied: the factor by which the update multiplied gradients: the mean, the loss scale and clipping in one; with
            several norms, one for each.
        mean: the factor that makes gradients in memory those of the mean loss, without clipping.
        packed: loss, grad_norm, loss_scale, finite, skipped, and how many ranks cast each vote: fp64 [5 + VOTES], so
            that one copy brings all of them to the host.
    """

    loss: Tensor
    grad_norm: Tensor
    skipped: Tensor
    finite: Tensor
    loss_scale: Tensor
    squares: Tensor
    applied: Tensor
    mean: Tensor
    packed: Tensor


class Engine:
    """The parameters, gradients and updates of one rank's units.

    Args:
        stages: the names of the units that each stage of this rank uses, in forward order.
        units: all units of this rank, in forward order.
        order: the names of all units of the model, in forward order.
        optimizer: updates these units.
        clips: the largest norms of gradients: of those without a norm of their own, then of each norm that groups of
            parameters name (`Group.clip`); 0 disables clipping.
        tokens_per_step: global batch x sequence length, the constant that losses are divided by.
        grid: the ranks that share the step.
        scaling: whether losses are scaled, as fp16 needs.
        ops: the kernels to use, for the device that does the update.
        offload: the homes of values that do not rest on the device; None: all rest there.
        extensions: the extensions of the units.
        halts: after a step that is not finite, no step updates; False: only steps that are not finite are skipped.
        gather: how units are gathered; None: every rank gathers the same ones in the same order.

    Attributes:
        stages: the gradients of each stage of this rank, in forward order.
    """

    def __init__(
        self,
        stages: list[list[str]],
        units: list[Unit],
        order: list[str],
        optimizer: Optimizer,
        *,
        clips: Sequence[float],
        tokens_per_step: int,
        grid: Grid,
        scaling: bool,
        ops: Operations,
        offload: Offload | None = None,
        extensions: Sequence[Extension] = (),
        halts: bool = True,
        gather: Gather | None = None,
    ):
        self._halts = halts
        self._offload, self._extensions = offload or Offload(), extensions
        self.units, self.optimizer, self.grid, self.ops = units, optimizer, grid, ops
        self.clips, self.tokens_per_step = clips, tokens_per_step
        device = units[0].device if units else torch.device("cpu")
        self.gather = gather or Gather(device)
        self.delayed = Delayed(self.gather.publish) if self._offload.delayed else None
        self.loss_scale = LossScale(device, dynamic=scaling)
        self._units = {unit.layout.name: unit for unit in units}
        self.stages: list[StageGradients] = []
        taken: set[str] = set()
        for names in stages:  # the first stage that uses a unit reduces it: its backward comes last
            own = [self._units[name] for name in names if name not in taken]
            taken.update(names)
            used = [self._units[name] for name in names]
            self.stages.append(StageGradients(used, Reduction(own, device), self.gather))
        places = [order.index(unit.layout.name) for unit in units]
        self._places = torch.tensor(places, device=device)
        # The norm counts a unit of both ends of the pipeline once: on the first stage. The last stage has a copy.
        copies = {place for place, unit in zip(places, units, strict=True) if unit.axes.copies.rank > 0}
        counted = [[place not in copies] * len(clips) for place in range(len(order))]
        self._counted = torch.tensor(counted, device=device)
        # Sum of losses, count of valid tokens, sum of squares if it is not finite, votes: one tensor, so that all are
        # summed over ranks at once. Counts are exact in fp64 up to 2^53.
        self._totals = torch.zeros(3 + VOTES, dtype=torch.float64, device=device)
        self._halted = torch.zeros((), dtype=torch.bool, device=device)

    def shard_layers(
        self,
        stage: StageGradients,
        layers: Sequence[Layer],
        names: Sequence[list[str]],
        *,
        keep_last: bool,
        recomputed: Container[Layer] = (),
    ) -> list[Layer]:
        """Return the layers of one stage, each with hooks around it that gather and release its units.

        Args:
            stage: one of `stages`.
            layers: in forward order.
            names: for each layer, the names of the units that it uses.
            keep_last: the last layer's backward follows its forward, so its parameters stay gathered.
            recomputed: the layers whose forward runs again in their backward.
        """
        units = [[self._units[name] for name in used] for used in names]
        stage.first_units = units[0]
        whole = all(unit.parameters.rest_whole for used in units for unit in used)
        sharded: list[ShardedLayer] = []
        for layer, used in zip(layers, units, strict=True):
            before, again = (sharded[-1] if sharded else None), layer in recomputed
            sharded.append(ShardedLayer(layer, used, self.gather, before, recomputed=again, rests_whole=whole))
        sharded[-1].keep = keep_last
        return [*sharded]

    def begin_step(self) -> None:
        """Reset the per-step state: sums, deferred and accumulated gradients."""
        self._totals.zero_()
        for stage in self.stages:
            stage.clear()
        for unit in self.units:
            unit.gradients.begin_step()

    def loss(self, losses_SB: Tensor, valid_SB: Tensor) -> Tensor:
        """Add one micro-batch's token losses, and its number of valid tokens, to the step's.

        Return the losses' sum / `tokens_per_step`, times the loss scale, for backward.

        Args:
            losses_SB: 0 where not valid.
        """
        self._totals[0] += losses_SB.detach().sum(dtype=torch.float64)
        self._totals[1] += valid_SB.sum()
        return self.loss_scale.scaled(losses_SB.sum() / self.tokens_per_step)

    def reduce_tied(self) -> None:
        """Sum the reduced gradients of units that the first and the last stage share, once a step."""
        sum_copies(self.units)

    def finish_step(
        self, lr: float, votes: Iterable[int] = (), *, elsewhere: Tensor | None = None, most: float = math.inf
    ) -> StepResult:
        """Complete the partial sums, clip, and update unless the step is to be skipped.

        Args:
            lr: the learning rate of this update.
            votes: the votes of this rank, each in [0, VOTES).
            elsewhere: sum of squared gradients, over all ranks, of parameters that are updated elsewhere, fp64; part of
                the norm.
            most: the step is skipped if its gradient norm is larger.
        """
        sum_tails(reversed(self.units))
        self._offload.settle()
        squares = unit_squares(self.units, self._places, self._counted, self.grid["pipeline"], self.ops)
        loss_sum, valid, odd, *_ = self._sum_totals(squares.sum(), votes).unbind()
        loss_scale = self.loss_scale.scale.clone()
        factor = self.tokens_per_step / valid / loss_scale
        sums = squares.sum(0) + odd  # of each norm by which groups are clipped
        if elsewhere is not None:
            sums[0] += elsewhere
        norm = sums.sum().sqrt() * factor
        loss = loss_sum / valid
        empty = valid == 0
        finite = (torch.isfinite(norm) & torch.isfinite(loss)) | empty
        if self._halts and not self.loss_scale.dynamic:
            self._halted |= ~finite
        skipped = self._halted | empty | ~finite
        if most < math.inf:
            skipped |= norm > most
        self.loss_scale.update(finite, counts=~empty)
        for extension in self._extensions:
            extension.end_step(skipped, loss_scale, self.loss_scale.scale)
        scale, skip = factor * clip_factor(norm, self.clips[0]), skipped.to(torch.float32)
        if len(self.clips) > 1:
            norms = zip(sums.sqrt() * factor, self.clips, strict=True)
            scale = factor * torch.stack([clip_factor(own, clip) for own, clip in norms])
        applied = scale
        if self._offload.optimizer is not None:  # the host does the update
            scale, skip = Readback(scale, skip).wait()

        def update(unit: Unit) -> None:
            self.optimizer.update(unit, lr=lr, scale=scale, skip=skip)

        if self.delayed is not None:
            self.delayed.flush_delayed()
            self._offload.settle()  # until published values have left the memory that the next update writes
            self.delayed.begin(self.units, update)
        else:
            for unit in self.units:
                if unit.parameters.publishes:
                    self.gather.unshard([unit])  # an earlier update's gather may still read this memory
                update(unit)
                self.gather.publish(unit)
        flags = (x.to(torch.float64) for x in (loss, norm, loss_scale, finite, skipped))
        packed = torch.cat([torch.stack([*flags]), self._totals[3:]])
        return StepResult(loss, norm, skipped, finite, loss_scale, squares.view(-1), applied, factor, packed)

    def _sum_totals(self, squares: Tensor, votes: Iterable[int]) -> Tensor:
        """Return the totals of a step, summed over all ranks; see `_totals`."""
        totals, world = self._totals, self.grid["world"]
        if not self.grid.counts("loss"):
            only_odd(totals[:2])
        totals[2] = only_odd(squares)
        for vote in votes:
            totals[3 + vote].fill_(1.0)  # by a kernel: a tensor on the host would have to be copied
        return all_reduce(totals, world, "loss")

    def flush_delayed(self) -> None:
        """Wait for the delayed update and publish it. Every rank calls it."""
        if self.delayed is not None:
            self.delayed.flush_delayed()

    def forget_between_steps(self) -> None:
        """Drop the state that extensions keep from step to step: a run that resumes from a checkpoint has none."""
        for extension in self._extensions:
            extension.forget()

    def restore(self, updates: int, loss_scale: float | None, good_steps: int, *, averaged: bool = True) -> None:
        """Continue from masters and moments that have been loaded.

        Args:
            updates: the number of updates that they have seen.
            loss_scale, good_steps: state of the loss scale; None if the saved run had none.
            averaged: averages have been loaded too; False: they begin with the masters.
        """
        self.forget_between_steps()
        self.gather.finish()
        for unit in self.units:
            for piece in self.optimizer.pieces(unit):
                piece.step.fill_(updates)
            for masters, average in () if averaged else self._averages(unit):
                average.copy_(masters)
            unit.resting.round_masters()
            self.gather.publish(unit)
        if self.loss_scale.dynamic and loss_scale is not None:
            self.loss_scale.scale.fill_(loss_scale)
            self.loss_scale.good.fill_(good_steps)

    def exchange_averages(self) -> None:
        """Exchange parameters and their averages; a second call restores both. Every rank calls it."""
        self.flush_delayed()
        self.gather.finish()
        for unit in self.units:
            for pair in self._averages(unit):
                for masters, average in zip(*(each.split(_AT_ONCE) for each in pair), strict=True):
                    kept = masters.clone()
                    masters.copy_(average)
                    average.copy_(kept)
            unit.resting.round_masters()
            self.gather.publish(unit)

    def _averages(self, unit: Unit) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the masters of each run of elements of a unit, with their averages; nothing if none are kept."""
        for run in self.optimizer.runs(unit):
            if AVERAGE in run.state:
                yield unit.masters[run.where], run.state[AVERAGE]

    def examine(self, compute: Callable[[], None], loss_scale: Tensor) -> list[tuple[int, str]]:
        """Compute a step again without reducing or updating, and return which of this rank's gradients are not finite.

        A step that was not finite has changed nothing, so it can be repeated bit for bit (except with delayed updates,
        where the previous update has been published since then). Here each rank's own gradients are examined, at the
        point where they would be summed with those of others. Every rank calls it.

        Args:
            compute: runs forward and backward of all micro-batches of the step.
            loss_scale: the scale that the step had.

        Returns:
            (index of this rank's stage, a text that names the gradient), in the order in which they were found.
        """
        faults: list[tuple[int, str]] = []
        self.loss_scale.scale.copy_(loss_scale)
        self.begin_step()

        def inspect(number: int, unit: Unit) -> None:
            for name, own in unit.gradients.views.items():
                if not torch.isfinite(own.view).all():
                    faults.append((number, f"gradient of {name}"))

        for number, stage in enumerate(self.stages):
            stage.reduction.inspect = partial(inspect, number)
        try:
            compute()
        finally:
            for stage in self.stages:
                stage.reduction.inspect = None
        return faults

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (full name, values of this rank's part) of every parameter, in unit order; gather sharded ones.

        Values are views that are valid until the next iteration. Every rank of the data axis must iterate over all of
        them.
        """
        for unit in self.units:
            self.gather.unshard([unit])
            for interval in unit.layout.intervals:
                yield interval.name, unit.parameters.value(interval.name)
            self.gather.reshard([unit])

    def reduced_fault(self) -> str | None:
        """Name a reduced gradient of this rank's shard that is not finite, if any; valid until the next backward."""
        for unit in self.units:
            with unit.gradients.reduced_in_memory() as reduced:
                for interval in unit.layout.intervals:
                    start, stop = (max(edge - unit.shard.start, 0) for edge in (interval.start, interval.stop))
                    if not torch.isfinite(reduced[start:stop]).all():
                        return f"reduced gradient of {interval.name}"
        return None
