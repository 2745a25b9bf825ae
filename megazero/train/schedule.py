"""Define the schedule of a run: its steps, its learning rate, and what follows which step."""

from dataclasses import dataclass

from megazero.optim.learning_rate import LearningRate


@dataclass(frozen=True)
class TrainSchedule:
    """The schedule of a run: steps, learning rate, and intervals.

    Attributes:
        steps: of the run.
        learning_rate: by updates done.
        log_every: steps between rows.
        valid_every: steps between validations; None: only after the last step.
        last: the last step of this trainer, from 1: the run's last step, or a saved step where another trainer takes
            over.
        check_every: steps between comparisons of values that several ranks hold; 0: none.
        averages: validations compute with the averages of parameters.
    """

    steps: int
    learning_rate: LearningRate
    log_every: int
    valid_every: int | None
    last: int
    check_every: int = 0
    averages: bool = False

    def validates(self, done: int) -> bool:
        """Return True if the schedule has a validation after step `done`, counted from 1."""
        return done == self.steps or (self.valid_every is not None and done % self.valid_every == 0)

    def logs(self, done: int) -> bool:
        """Return True if step `done`, counted from 1, is logged as a row."""
        return done == self.steps or done % self.log_every == 0
