"""Execute a schedule: one function for each kind of action, and a table of them.

The same code runs a model in one stage on one process (its 1f1b is F0 B0 F1 B1 ...) and in many on many.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megazero.pipeline.stage import Stage, StageInputs
from megazero.pipeline.transport import Transport
from megazero.schedules.actions import Action, Kind, Schedule, before_forward

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
BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


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
        self.stages, self.num_stages, self._rank, self._transport = stages, num_stages, rank, transport
        self._schedule, self._shape, self._reduce_tied = cache(schedule), shape, reduce_tied
        self._batches: Sequence[Batch] = ()
        self._feed: Callable[[Batch], StageInputs] = lambda batch: batch
        self._reduced: frozenset[tuple[int, int]] = frozenset()
        self._before_forward: frozenset[tuple[int, int]] = frozenset()
        self._look: Look | None = None
        self._losses: list[Tensor] = []

    def begin(
        self,
        batches: Sequence[Batch],
        feed: Callable[[Batch], StageInputs],
        *,
        look: Look | None = None,
        trains: bool = True,
    ) -> Sequence[Action]:
        """Begin a step, and return what this rank has to do in it, in order: forward, backward, communicate.

        Args:
            batches: the micro-batches, in order.
            feed: what the stages need to know of one; asked for when a forward begins.
            look: called with what each stage makes for another: output of a forward, or gradient of its input.
            trains: False: of the step's actions those of forward alone.
        """
        self._transport.open()
        self._batches, self._feed, self._look = batches, feed, look
        for stage in self.stages.values():
            stage.clear()
        schedule = self._schedule(len(batches))
        actions = (schedule if trains else schedule.forward_only()).ranks[self._rank]
        self._reduced = frozenset((a.stage, a.micro_batch) for a in actions if a.kind is Kind.REDUCE)
        self._before_forward = before_forward(actions)
        return actions

    def end(self) -> None:
        """End a step: wait until all that was sent has gone. Gradients are where the engine updates from."""
        self._transport.finish()
        self._batches = ()

    def train(
        self,
        batches: Sequence[Batch],
        feed: Callable[[Batch], StageInputs],
        *,
        before: Callable[[Action], object] = lambda action: None,
        look: Look | None = None,
    ) -> None:
        """Run a whole step; see `begin`. `before` is called with each action."""
        for action in self.begin(batches, feed, look=look):
            before(action)
            self.run(action)
        self.end()

    def actions(self, micro_batches: int) -> Sequence[Action]:
        """Return what this rank does in a training step of some micro-batches, in order."""
        return self._schedule(micro_batches).ranks[self._rank]

    def describe(self, action: Action) -> str | None:
        """Return what an action is, for people; None of one that takes no time of its own."""
        if action.kind not in _WORDS:
            return None
        place = f" in stage {action.stage}" if self.num_stages > 1 else ""
        return f"{_WORDS[action.kind]} of micro-batch {action.micro_batch}{place}"

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch], feed: Callable[[Batch], StageInputs]) -> list[Tensor]:
        """Return the token losses of every batch where the last stage is, nothing elsewhere."""
        for action in self.begin(batches, feed, trains=False):
            self.run(action)
        self.end()
        losses, self._losses = self._losses, []
        return losses

    def run(self, action: Action) -> None:
        """Do one action of a step that has begun."""
        if action.kind is F:
            self.forward(action)
        elif action.kind in BACKWARDS:
            self.backward(action)
        else:
            self.communicate(action)

    def forward(self, action: Action) -> None:
        """Run the forward of one micro-batch in one stage."""
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

    def backward(self, action: Action) -> None:
        """Run the backward of one micro-batch in one stage, or the part of it that is the input's or the weights'."""
        index, m, stage = action.stage, action.micro_batch, self.stages[action.stage]
        if action.kind is Kind.BACKWARD_WEIGHT:
            stage.backward_weight(m, **self._reduction(action))
            return
        gradient = self._transport.take(B, index, m) if stage.loss is None else None
        follows = (index, m) in self._before_forward
        if action.kind is B:
            gradient = stage.backward(m, gradient, forward_follows=follows, **self._reduction(action))
        else:
            gradient = stage.backward_input(m, gradient, forward_follows=follows)
        if gradient is not None:
            if self._look is not None:
                self._look(B, index, m, gradient)
            self._transport.put(B, index - 1, m, gradient)

    def communicate(self, action: Action) -> None:
        """Send, receive, or finish the reduction of gradients."""
        if action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
            self._transport.send(action)
        elif action.kind in (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD):
            self._transport.post(action, self._shape(self._batches[action.micro_batch]))
        elif action.kind is Kind.REDUCE:
            self.stages[action.stage].finish_reduction()
        else:
            assert action.kind is Kind.TIE, action
            self._reduce_tied()

    def _reduction(self, action: Action) -> dict[str, bool]:
        """Return whether gradients are reduced after a backward pass, and whether it is the step's last."""
        last = action.micro_batch == len(self._batches) - 1
        return {"reduce": (action.stage, action.micro_batch) in self._reduced, "last": last}
