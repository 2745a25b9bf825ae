"""Execute a schedule: one function for each kind of action, and a table of them.

The same code runs a model in one stage on one process (its 1f1b is F0 B0 F1 B1 ...) and in many on many.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megazero.pipeline.stage import Stage, StageInputs
from megazero.pipeline.transport import Transport
from megazero.schedules.actions import Action, Kind, Schedule

Batch = Any  # a micro-batch; the pipeline only hands it on
Look = Callable[[Kind, int, int, Tensor], object]  # FORWARD or BACKWARD, stage, micro-batch, what was made
F, B = Kind.FORWARD, Kind.BACKWARD
_WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward (input)",
    Kind.BACKWARD_WEIGHT: "backward (weight)",
    Kind.REDUCE: "reduction",
    Kind.TIE: "tied sum",
}
_BEGIN_BACKWARD = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


class Pipeline:
    """The stages of one rank, and the steps of a schedule.

    Args:
        stages: of this rank, by their index.
        num_stages: of all ranks.
        rank: on the pipeline axis.
        schedule: number of micro-batches -> the actions of all ranks in a step.
        transport: between stages.
        shape: of a batch's residual stream on this rank.
        reduce_tied: sums the shared weight's gradient over first and last stage.
    """

    def __init__(
        self,
        stages: dict[int, Stage],
        num_stages: int,
        rank: int,
        schedule: Callable[[int], Schedule],
        transport: Transport,
        shape: Callable[[Batch], Sequence[int]],
        reduce_tied: Callable[[], None],
    ):
        self.stages, self.num_stages = stages, num_stages
        self._rank, self._schedule, self._transport, self._shape, self._reduce_tied = (
            rank,
            schedule,
            transport,
            shape,
            reduce_tied,
        )
        self._training: dict[int, Schedule] = {}
        self._evaluation: dict[int, Schedule] = {}
        self._batches: Sequence[Batch] = ()
        self._feed: Callable[[Batch], StageInputs] = lambda batch: batch
        self._reduced: frozenset[tuple[int, int]] = frozenset()
        self._look: Look | None = None
        self._losses: list[Tensor] = []
        self._do: dict[Kind, Callable[[Action], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
            Kind.SEND_FORWARD: transport.send,
            Kind.SEND_BACKWARD: transport.send,
            Kind.RECEIVE_FORWARD: self._post,
            Kind.RECEIVE_BACKWARD: self._post,
            Kind.REDUCE: lambda action: self.stages[action.stage].finish_reduction(),
            Kind.TIE: lambda action: self._reduce_tied(),
        }

    def train(
        self,
        batches: Sequence[Batch],
        feed: Callable[[Batch], StageInputs],
        *,
        now: Callable[[str], object] = lambda phase: None,
        between: Callable[[], object] = lambda: None,
        look: Look | None = None,
    ) -> None:
        """Run forward and backward of every micro-batch; gradients are left where the engine updates from.

        Args:
            batches: the micro-batches, in order.
            feed: what the stages need to know of one; asked for when a forward begins.
            now: called with what is being done.
            between: called once, before the first backward.
            look: called with what each stage makes for another: output of a forward, or gradient of its input.
        """
        self._feed, self._look = feed, look
        self._run(self._lowered(self._training, len(batches), lambda schedule: schedule), batches, now, between)

    def num_passes(self, micro_batches: int) -> int:
        """Return the number of passes of this rank in a step, which is how often `now` is called."""
        schedule = self._lowered(self._training, micro_batches, lambda schedule: schedule)
        return sum(action.kind in _WORDS for action in schedule.ranks[self._rank])

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch], feed: Callable[[Batch], StageInputs]) -> list[Tensor]:
        """Return the token losses of every batch where the last stage is, nothing elsewhere."""
        self._feed, self._look = feed, None
        schedule = self._lowered(self._evaluation, len(batches), Schedule.forward_only)
        self._run(schedule, batches, lambda phase: None, lambda: None)
        losses, self._losses = self._losses, []
        return losses

    def _run(
        self,
        schedule: Schedule,
        batches: Sequence[Batch],
        now: Callable[[str], object],
        between: Callable[[], object],
    ) -> None:
        self._transport.open()
        actions = schedule.ranks[self._rank]
        self._batches = batches
        for stage in self.stages.values():
            stage.clear()
        self._reduced = frozenset((a.stage, a.micro_batch) for a in actions if a.kind is Kind.REDUCE)
        begun = False
        for action in actions:
            if action.kind in _WORDS:
                place = f" in stage {action.stage}" if self.num_stages > 1 else ""
                now(f"{_WORDS[action.kind]} of micro-batch {action.micro_batch}{place}")
            if not begun and action.kind in _BEGIN_BACKWARD:
                begun = True
                between()
            self._do[action.kind](action)
        self._transport.finish()
        self._batches = ()

    def _lowered(
        self, known: dict[int, Schedule], micro_batches: int, choose: Callable[[Schedule], Schedule]
    ) -> Schedule:
        if micro_batches not in known:
            known[micro_batches] = choose(self._schedule(micro_batches))
        return known[micro_batches]

    def _forward(self, action: Action) -> None:
        index, m = action.stage, action.micro_batch
        stage = self.stages[index]
        x = self._transport.take(F, index, m) if index > 0 else None
        y = stage.forward(m, x, self._feed(self._batches[m]))
        if self._look is not None:
            self._look(F, index, m, y)
        if stage.loss is None:
            self._transport.put(F, index + 1, m, y)
        elif not torch.is_grad_enabled():
            self._losses.append(y)

    def _backward(self, action: Action) -> None:
        index, m = action.stage, action.micro_batch
        stage = self.stages[index]
        gradient = self._transport.take(B, index, m) if stage.loss is None else None
        if action.kind is B:
            gradient = stage.backward(m, gradient, **self._reduction(action))
        else:
            gradient = stage.backward_input(m, gradient)
        if gradient is not None:
            if self._look is not None:
                self._look(B, index, m, gradient)
            self._transport.put(B, index - 1, m, gradient)

    def _backward_weight(self, action: Action) -> None:
        self.stages[action.stage].backward_weight(action.micro_batch, **self._reduction(action))

    def _reduction(self, action: Action) -> dict[str, bool]:
        """Return whether gradients are reduced after a backward pass, and whether it is the step's last."""
        last = action.micro_batch == len(self._batches) - 1
        return {"reduce": (action.stage, action.micro_batch) in self._reduced, "last": last}

    def _post(self, action: Action) -> None:
        self._transport.post(action, self._shape(self._batches[action.micro_batch]))
