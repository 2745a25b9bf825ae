"""Execute the actions of a schedule on one rank.

The same code runs one stage on one process (1f1b is then F0 B0 F1 B1 ...) and many stages on many processes.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megazero.pipeline.stage import Stage, StageInputs
from megazero.pipeline.transport import Transport
from megazero.schedules.actions import Action, B, F, Kind, Schedule, before_forward

Batch = Any  # a micro-batch; the pipeline only passes it on
Look = Callable[[Kind, int, int, Tensor], object]  # (FORWARD or BACKWARD, stage, micro-batch, output or gradient)
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
    """Runs the stages of one rank, step by step, by a schedule.

    Args:
        stages: of this rank, by index.
        num_stages: over all ranks.
        rank: on the pipeline axis.
        schedule: function of the number of micro-batches; returns the actions of all ranks in a step.
        transport: sends and receives tensors between stages.
        shape: function of a micro-batch; returns the shape of its residual stream on this rank.
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
        self.schedule, self._shape, self._reduce_tied = cache(schedule), shape, reduce_tied
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
        """Begin a step; return this rank's actions in order: forward, backward and communication.

        Args:
            batches: the micro-batches, in order.
            feed: returns the stage inputs of a micro-batch; called when its forward begins.
            look: called with the output of each forward and the input gradient of each backward.
            trains: False: return only the actions of forward.
        """
        self._transport.open()
        self._batches, self._feed, self._look = batches, feed, look
        for stage in self.stages.values():
            stage.clear()
        schedule = self.schedule(len(batches))
        actions = (schedule if trains else schedule.forward_only()).ranks[self._rank]
        self._reduced = frozenset((a.stage, a.micro_batch) for a in actions if a.kind is Kind.REDUCE)
        self._before_forward = before_forward(actions)
        return actions

    def end(self) -> None:
        """End a step: wait until all sends are complete. Gradients are then ready for the engine's update."""
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
        """Return this rank's actions, in order, in a training step with `micro_batches` micro-batches."""
        return self.schedule(micro_batches).ranks[self._rank]

    def describe(self, action: Action) -> str | None:
        """Return a description of an action for display; None for a send or a receive, which takes no time itself."""
        if action.kind not in _WORDS:
            return None
        place = f" in stage {action.stage}" if self.num_stages > 1 else ""
        return f"{_WORDS[action.kind]} of micro-batch {action.micro_batch}{place}"

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch], feed: Callable[[Batch], StageInputs]) -> list[Tensor]:
        """Return the token losses of every batch on the rank with the last stage, [] on other ranks."""
        for action in self.begin(batches, feed, trains=False):
            self.run(action)
        self.end()
        losses, self._losses = self._losses, []
        return losses

    def run(self, action: Action) -> None:
        """Run one action of the current step."""
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
        y = stage.forward(m, self._transport.take(F, index, m) if index > 0 else None, self._feed(self._batches[m]))
        if self._look is not None:
            self._look(F, index, m, y)
        if stage.loss is None:
            self._transport.put(F, index + 1, m, y)
        elif not torch.is_grad_enabled():
            self._losses.append(y)

    def backward(self, action: Action) -> None:
        """Run the backward of one micro-batch in one stage, or only its part for the input or for the weights."""
        index, m, stage = action.stage, action.micro_batch, self.stages[action.stage]
        if action.kind is Kind.BACKWARD_WEIGHT:
            stage.gradients.backward_weight(m, **self._reduction(action))
            return
        gradient = self._transport.take(B, index, m) if stage.loss is None else None
        run, how = stage.gradients.backward_input, {"forward_follows": (index, m) in self._before_forward}
        if action.kind is B:
            run, how = stage.gradients.backward, how | self._reduction(action)
        gradient = stage.backward(m, gradient, run, **how)
        if gradient is not None:
            if self._look is not None:
                self._look(B, index, m, gradient)
            self._transport.put(B, index - 1, m, gradient)

    def communicate(self, action: Action) -> None:
        """Send, post a receive, finish a reduction of gradients, or sum the tied weight's gradient."""
        if action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
            self._transport.send(action)
        elif action.kind in (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD):
            self._transport.post(action, self._shape(self._batches[action.micro_batch]))
        elif action.kind is Kind.REDUCE:
            self.stages[action.stage].gradients.finish_reduction()
        else:
            assert action.kind is Kind.TIE, action
            self._reduce_tied()

    def _reduction(self, action: Action) -> dict[str, bool]:
        """Return the arguments `reduce` (gradients are reduced after this backward) and `last` (last micro-batch)."""
        last = action.micro_batch == len(self._batches) - 1
        return {"reduce": (action.stage, action.micro_batch) in self._reduced, "last": last}
