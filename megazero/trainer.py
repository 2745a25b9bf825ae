"""The loop: batch, forward and backward, clip, update, observe, validate.

The trainer receives built objects and plain numbers. Steps are counted from 0 here and shown from 1; a step is one
batch consumed, skipped or not; the learning rate counts updates, which are steps minus skipped ones.

The host does not wait for the device inside a step. What a step computed is read between the first forward and the
first backward of the *next* step (or when the step is logged): by then the device has enough to do, so reading costs
nothing, the exact learning rate of the next update is known, and a loss that is not finite is noticed before a second
update could have happened (the device suppresses the first one by itself).

A step that was not finite has changed nothing. Before the run ends, every rank computes it once more without the
others, so that the error names the rank and the parameter with which it began.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.data.loader import BatchLoader, MicroBatch
from megazero.errors import UserError
from megazero.learning_rate import LearningRate
from megazero.observe.recorder import Numbers, Recorder
from megazero.validation import Score, Validation
from megazero.zero.engine import Engine, StepResult


@dataclass(frozen=True)
class Pace:
    """How long, how fast, and how often.

    Attributes:
        steps: of the run.
        learning_rate: by updates done.
        log_every: steps between rows.
        valid_every: steps between validations; None: only after the last step.
    """

    steps: int
    learning_rate: LearningRate
    log_every: int
    valid_every: int | None

    def validates(self, step: int) -> bool:
        done = step + 1
        return done == self.steps or (self.valid_every is not None and done % self.valid_every == 0)

    def logs(self, step: int) -> bool:
        done = step + 1
        return done == self.steps or done % self.log_every == 0


OVERFLOWS = 50  # skipped steps in a row, with a loss scale, after which a run ends

Blame = Callable[[str | None, Callable[[int, str | None], UserError]], UserError]


@dataclass(frozen=True)
class _Pending:
    """A step that has been issued and whose numbers the host has not read."""

    step: int
    lr: float
    result: StepResult


class Trainer:
    """Trains for `pace.steps` steps.

    Args:
        engine: gradients and update.
        losses: (micro-batch, step) -> token losses [S, B], with autograd.
        loader: the micro-batches of each step.
        validation: None for none.
        recorder: observes.
        pace: when to do what.
        save: writes the final weights; called once, before the last validation or anything else can fail.
        now: told the step (from 1) and what is being done.
        blame: finds the first rank whose own part of a step was at fault; given what is wrong with this rank's, and
            how to say it, returns the error to raise.
    """

    def __init__(
        self,
        engine: Engine,
        losses: Callable[[MicroBatch, int], Tensor],
        loader: BatchLoader,
        validation: Validation | None,
        recorder: Recorder,
        pace: Pace,
        save: Callable[[], object],
        now: Callable[[int, str], object],
        blame: Blame,
    ):
        self.engine, self.losses, self.loader = engine, losses, loader
        self.validation, self.recorder, self.pace, self.save, self.now = validation, recorder, pace, save, now
        self.blame = blame
        self.skipped = self.overflows = 0
        self.score: Score | None = None
        self._pending: _Pending | None = None

    def run(self) -> None:
        """Trains. The last validation's result is `score`.

        Raises:
            UserError: 301, loss or gradient norm of a step are not finite; that step did not update.
        """
        self.recorder.start()
        for step in range(self.pace.steps):
            with self.recorder.step(step + 1):
                self._step(step)
            if self.pace.logs(step) or self.pace.validates(step):
                self._settle()

    def close(self) -> None:
        """Ends background work and writes out what is left."""
        try:
            self.loader.close()
        finally:
            self.recorder.close()

    def _step(self, step: int) -> None:
        self.now(step + 1, "data")
        batches = self.loader.step(step)
        self.engine.begin_step(len(batches))
        for m, batch in enumerate(batches):
            self.now(step + 1, "forward")
            self.engine.forward(m)
            losses_SB = self.losses(batch, step)
            self._settle()
            self.now(step + 1, "backward")
            self.engine.backward(losses_SB, batch.valid_SB, m)
        self.now(step + 1, "update")
        lr = self.pace.learning_rate.at(step - self.skipped)
        self._pending = _Pending(step, lr, self.engine.finish_step(lr))

    def _settle(self) -> None:
        """Reads the numbers of the step issued last, if they have not been read: the host waits for it here."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        self.overflows = 0 if pending.result.finite.item() else self.overflows + 1
        if self.overflows == (OVERFLOWS if self.engine.loss_scale.dynamic else 1):
            raise self._not_finite(pending)
        self.skipped += int(pending.result.skipped.item())
        if pending.step + 1 == self.pace.steps:
            self.now(pending.step + 1, "save")
            self.save()
        valid_loss = self._validate(pending.step + 1) if self.pace.validates(pending.step) else None
        if valid_loss is not None or self.pace.logs(pending.step):
            result = pending.result
            numbers = Numbers(
                result.loss.item(), result.grad_norm.item(), pending.lr, result.loss_scale.item(), self.skipped
            )
            self.recorder.record(pending.step + 1, numbers, valid_loss)

    def _validate(self, done: int) -> float | None:
        if self.validation is None:
            return None
        self.now(done, "validation")
        with self.recorder.aside(), torch.no_grad():
            self.score = self.validation.score()
        return self.score.loss

    def _not_finite(self, pending: _Pending) -> UserError:
        self.now(pending.step + 1, "examination")
        batches = self.loader.step(pending.step)
        scale = pending.result.loss_scale
        own = self.engine.examine(lambda m: self.losses(batches[m], pending.step), len(batches), scale)

        def say(rank: int, fault: str | None) -> UserError:
            result = pending.result
            what = f"loss {result.loss.item()}, gradient norm {result.grad_norm.item()}"
            if self.overflows > 1:
                what += f", skipped {self.overflows} steps in a row, loss scale {result.loss_scale.item():g}"
            what += (
                f"; first not finite: {fault}" if fault else "; not again when computed anew: a fault of the machine?"
            )
            what += "; this step did not update"
            return UserError(301, what, "lower optimizer.lr or raise schedule.warmup", rank=rank, step=pending.step + 1)

        return self.blame(own, say)
