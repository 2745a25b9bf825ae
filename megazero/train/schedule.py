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
        last: the last step of this trainer, from 1: the run's last step, or a saved step where another trainer takes
            over.
        averages: evaluations compute with the averages of parameters.
    """

    steps: int
    learning_rate: LearningRate
    log_every: int
    last: int
    averages: bool = False

    def logs(self, done: int) -> bool:
        """Return True if step `done`, counted from 1, is logged as a row."""
        return done == self.steps or done % self.log_every == 0
