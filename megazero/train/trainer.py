"""The training loop: batch, forward and backward, clip, update, log, validate.

The trainer receives built objects and plain numbers. Steps are counted from 0 here and displayed from 1; a step
consumes one batch, skipped or not; the learning rate counts updates, which are steps minus skipped ones.

The host does not wait for the device inside a step. A step's results are copied to the host after the step, and read
before the first backward of the *next* step (or when the step is logged): the host waits only for the end of the
earlier step, while the device runs forwards of the next. So the exact learning rate of the next update is known, and a
non-finite loss is detected before a second update (the device itself suppresses the first). The trainer reacts to it
when the passes are done, which is the same point of the step on all ranks of a pipeline.

A non-finite step does not change any state. Before the run ends, all ranks repeat it without reducing gradients, so
that the error names the rank and the value where it began.
"""

from __future__ import annotations  # the types of arguments are only named here

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megazero.base.errors import UserError
from megazero.comm.readback import Readback
from megazero.observe.numbers import Value, finite
from megazero.pipeline.executor import BACKWARDS, Pipeline
from megazero.schedules.actions import Kind
from megazero.train.collection import GarbageCollection
from megazero.train.fault import AFTER_SUMS, Fault, own_fault
from megazero.train.schedule import TrainSchedule
from megazero.train.spikes import Spikes
from megazero.train.stopping import FAILED, Reason, Stopping
from megazero.train.validation import Evaluation
from megazero.zero.engine import Engine, StepNumbers, StepResult

if TYPE_CHECKING:  # types of arguments
    from megazero.checkpoint.progress import Progress
    from megazero.checkpoint.save import Checkpoints
    from megazero.data.batch import BatchSource, MicroBatch
    from megazero.observe.recorder import Recorder
    from megazero.pipeline.stage import StageInputs


TIDY_SECONDS = 5.0  # a run with a reason to stop spends at most this on deleting old checkpoints
OVERFLOWS = 50  # a run with a loss scale ends after this number of consecutive skipped steps

Blame = Callable[[Fault | None, Callable[[int, str | None], UserError]], UserError]


@dataclass(frozen=True)
class _Pending:
    """A step that has been issued, and whose results the trainer has not acted on yet."""

    step: int
    lr: float
    result: StepResult
    packed: Readback


@dataclass(eq=False)
class Trainer:
    """The training loop of one rank, up to the step `schedule.last`.

    Args:
        engine: runs the update.
        pipeline: runs forward and backward passes.
        feed: (micro-batch, step) -> the inputs of the stages.
        loader: the micro-batches of each step.
        evaluations: validations and others, in order.
        recorder: measures and logs steps.
        schedule: steps, learning rate and intervals.
        checkpoints: saves the state; the last step is saved before the last validation, which may fail.
        stopping: decides whether to end before the last step.
        summarise: writes the run's ledger; called by all ranks before the last step is saved.
        now: called with the step (from 1) and the current phase.
        spikes: recognises steps with unusual gradients.
        check: called with each step (from 1) after it is issued; may raise.
        blame: (this rank's fault or None, function that makes an error) -> the error of the rank with the first fault.
    """

    engine: Engine
    pipeline: Pipeline
    feed: Callable[[MicroBatch, int], StageInputs]
    loader: BatchSource
    evaluations: Sequence[Evaluation]
    recorder: Recorder
    schedule: TrainSchedule
    checkpoints: Checkpoints
    stopping: Stopping
    summarise: Callable[[], object]
    now: Callable[[int, str], object]
    blame: Blame
    spikes: Spikes
    check: Callable[[int], object] = int

    def __post_init__(self) -> None:
        self.first = self.skipped = self.overflows = self.carried = 0
        self.reason: Reason | None = None
        self.scores: dict[str, float] = {}
        self.owes = False  # an evaluation was interrupted or not started
        self._pending: _Pending | None = None
        self._numbers: StepNumbers | None = None  # of the pending step; None: not read yet
        self._reduced_fault: str | None = None  # in this rank's reduced gradients of the step that ends the run
        self._owed: Mapping[str, Value] | None = None
        self._most_overflows = OVERFLOWS if self.engine.loss_scale.dynamic else 1

    def begin(
        self,
        age: int,
        step: int = 0,
        done: Progress | None = None,
        owed: Mapping[str, Value] | None = None,
        *,
        averaged: bool = False,
    ) -> None:
        """Set the counters to match loaded tensors.

        Args:
            age: updates that the loaded moments have seen; 0 if only weights were loaded.
            step, done: the step to continue from and the run's progress there; None: the run begins.
            owed: that step's row of metrics, if an earlier job ended before writing it; written with its validation,
                if the step has one.
            averaged: averages of parameters were loaded.
        """
        self.first, self._owed, self.carried = step, owed, age
        if done is not None:
            self.skipped, self.overflows, self.carried = done.skipped, done.overflows, done.carried
            self.spikes.begin(done.norms, done.spikes)
        scale, good = (done.loss_scale, done.good_steps) if done else (None, 0)
        self.engine.restore(age, scale, good, averaged=averaged)

    def run(self) -> int:
        """Train; return the number of steps done.

        Afterwards `scores` has the last evaluations' results, and `reason` the reason for an early end, if any. All
        saves are committed.

        Raises:
            UserError: 301, loss or gradient norm of a step is not finite; the step did not update. 403, a checkpoint
                could not be written.
        """
        self.reason, done = self.stopping.check(), self.first
        if self._owed is not None or done < self.schedule.last:
            self.recorder.start()
        if self._owed is not None and self.reason is not None:
            self.owes = True  # the next job that resumes here writes the row
        elif self._owed is not None:
            self._write(self._owed, done, validates=self.validates(done))
        with GarbageCollection() as garbage:
            while self.reason is None and done < self.schedule.last:
                with self.recorder.step(done + 1):
                    self.train_step(done)
                done += 1
                self.check(done)
                rests = self.validates(done) or self.checkpoints.due(done) or done == self.schedule.last
                if self.reason or rests or self.schedule.logs(done):
                    self._settle(complete=True)
                garbage.after(done, rests=rests)
        if done and self.checkpoints.saved != done:  # no step was trained, and the run started from another run's step
            self._save(done)
        self.checkpoints.finish()
        self.checkpoints.tidy(math.inf if self.reason is None else TIDY_SECONDS)
        return done

    def close(self) -> None:
        """End background work and flush the logs."""
        try:
            self.loader.close()
            self.checkpoints.close()
        finally:
            self.recorder.close()

    def train_step(self, step: int) -> None:
        """Train one step: forward and backward of each micro-batch in the schedule's order, then the update."""
        self.now(step + 1, "data")
        batches = self.loader.step(step)
        self.engine.begin_step()
        for action in self.pipeline.begin(batches, lambda batch: self.feed(batch, step)):
            if (phase := self.pipeline.describe(action)) is not None:
                self.now(step + 1, phase)
            if action.kind is Kind.FORWARD:
                self.pipeline.forward(action)
            elif action.kind in BACKWARDS:
                self._read()
                self.pipeline.backward(action)
            else:
                self.pipeline.communicate(action)
        self.pipeline.end()
        self._settle(complete=False)
        self.now(step + 1, "update")
        self.checkpoints.settle()
        lr = self.schedule.learning_rate.at(step - self.skipped)
        votes = self.stopping.votes(failed=self.checkpoints.failed, saving=self.checkpoints.seconds)
        result = self.engine.finish_step(lr, votes, most=self.spikes.bound)
        self._pending = _Pending(step, lr, result, Readback(result.packed))

    def _read(self) -> None:
        """Read the results of the pending step, once. Only here the host waits for the end of a step."""
        if self._pending is not None and self._numbers is None:
            self._numbers = StepNumbers.of(self._pending.packed.numbers())
            if not self._numbers.finite and self.overflows + 1 == self._most_overflows:
                self._reduced_fault = self.engine.reduced_fault()  # before backward overwrites the reduced gradients

    def _settle(self, *, complete: bool) -> None:
        """Act on the results of the pending step, once: count, log, save, validate, or raise.

        Args:
            complete: no later step has begun; only then can the step's state be saved.
        """
        self._read()
        pending, numbers, self._pending, self._numbers = self._pending, self._numbers, None, None
        if pending is None or numbers is None:
            return
        self.overflows = 0 if numbers.finite else self.overflows + 1
        if self.overflows == self._most_overflows:
            raise self._not_finite(pending, numbers)
        self.skipped += numbers.skipped
        done = pending.step + 1
        self.spikes.add(done, numbers.grad_norm)
        self.reason = self.reason or self.stopping.counted(numbers.votes)
        if self.reason is FAILED:
            self.checkpoints.finish()  # raises
        last = complete and (done == self.schedule.last or self.reason is not None)
        row = self._row(pending, numbers) if last or self.validates(done) or self.schedule.logs(done) else None
        if last or (complete and self.checkpoints.due(done)):
            if last:
                self.summarise()
            self._save(done, row)
        stops = self.reason is not None and done < self.schedule.steps  # an early end leaves no time to validate
        if row is not None:
            self._write(row, done, validates=self.validates(done) and not stops)
        if self.owes and self.checkpoints.saved != done:  # save, so that the job that resumes here validates the step
            self.summarise()
            self._save(done, row)

    def validates(self, done: int) -> bool:
        """Return True if an evaluation follows step `done`, counted from 1."""
        return any(each.due(done, self.schedule.steps) for each in self.evaluations)

    def _row(self, pending: _Pending, read: StepNumbers) -> dict[str, Value]:
        """Return a step's row of metrics, without validation results (docs/metrics.md explains each key)."""
        done = pending.step + 1
        consumed: dict[str, Value] = {"samples": self.loader.samples(done), "epoch": self.loader.epoch(done)}
        if (epochs := self.loader.epochs(done)) is not None:
            consumed["epochs"] = {**epochs}
        clipped = int(len(self.engine.clips) == 1 and 0 < self.engine.clips[0] < read.grad_norm < math.inf)
        own = {"loss": read.loss, "grad_norm": read.grad_norm, "clipped": clipped, "lr": pending.lr}
        counts = {"loss_scale": read.loss_scale, "skipped": self.skipped}
        counts |= {"spikes": self.spikes.count} if self.spikes.count else {}
        return self.recorder.row(done, {**consumed, **own, **counts})

    def _write(self, row: Mapping[str, Value], done: int, *, validates: bool) -> None:
        self.recorder.write(row, self._validate(done) if validates else {})

    def _save(self, done: int, row: Mapping[str, Value] | None = None) -> None:
        from megazero.checkpoint.progress import Progress  # imported here: it needs pydantic, which no step does

        self.now(done, "save")
        self.engine.flush_delayed()
        self.engine.forget_between_steps()
        scale, samples = self.engine.loss_scale, self.loader.samples(done)
        with self.recorder.paused():
            progress = Progress(
                updates=done - self.skipped,
                skipped=self.skipped,
                overflows=self.overflows,
                next_sample=samples,
                loss_scale=scale.scale.item() if scale.dynamic else None,
                good_steps=int(scale.good.item()) if scale.dynamic else 0,
                carried=self.carried,
                norms=[*self.spikes.norms],
                spikes=self.spikes.count,
                row=None if row is None else finite(row),
            )
            self.checkpoints.save(done, progress)

    def _validate(self, done: int) -> dict[str, float]:
        """Return the results of the evaluations after a step; none if one was interrupted for `reason`."""
        self.now(done, "validation")
        scores, self.owes = dict[str, float](), False
        with self.recorder.paused(), torch.no_grad():
            if self.schedule.averages:
                self.engine.exchange_averages()
            for each in self.evaluations:
                score = each.score(done, self._ends) if each.due(done, self.schedule.steps) else {}
                self.owes = score is None
                if score is None:
                    break
                scores |= score
            if self.schedule.averages:
                self.engine.exchange_averages()
        if not self.owes:
            self.scores = scores
        return {} if self.owes else scores

    def _ends(self) -> bool:
        self.reason = self.reason or self.stopping.check(self.checkpoints.seconds)
        return self.reason is not None

    def _not_finite(self, pending: _Pending, numbers: StepNumbers) -> UserError:
        """Return the error of a non-finite step: repeat it to find the rank where it began. Collective."""
        step = pending.step
        self.now(step + 1, "examination")
        again = "computed again" if self.engine.delayed is None else "computed again one update later"
        again += ", all finite: a hardware fault or an overflow?"
        batches, scale = self.loader.step(step), pending.result.loss_scale
        own = own_fault(self.engine, self.pipeline, scale, batches, lambda batch: self.feed(batch, step))
        if own is None and self._reduced_fault is not None:
            own = AFTER_SUMS, f"{self._reduced_fault}; {again}"

        def say(rank: int, fault: str | None) -> UserError:
            what = f"loss {numbers.loss:.6g}, gradient norm {numbers.grad_norm:.6g}"
            if self.overflows > 1:
                what += f", skipped {self.overflows} steps in a row, loss scale {numbers.loss_scale:g}"
            what += f"; first not finite: {fault}" if fault else f"; {again}"
            what += "; this step did not update"
            return UserError(301, what, "lower optimizer.lr or raise schedule.warmup", rank=rank, step=step + 1)

        return self.blame(own, say)
