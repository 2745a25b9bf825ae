"""Define the progress of a run that a checkpoint keeps next to the tensors."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0, lt=2**63)]
StepCount = Annotated[int, Field(ge=0, lt=2**31)]  # as of run.steps
Number = Annotated[int, Field(ge=-(2**63), lt=2**63)] | Annotated[float, Field(allow_inf_nan=False)]


class StrictModel(BaseModel):
    """A value that is read from a file of a checkpoint: no key may be added, no type converted."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Progress(StrictModel):
    """The progress of the run, beyond the tensors.

    Attributes:
        updates: of the run, steps that were not skipped; the learning rate's count.
        carried: updates that the moments had seen before the run began (`checkpoint.load` optimizer): the optimizer's
            own count, for its bias correction, is `carried` + `updates`. Left out of the file where it is 0.
        skipped: steps, over the whole run.
        overflows: skipped steps in a row, up to this one.
        next_sample: id of the first sample not consumed.
        loss_scale: of the next step; None where none is used.
        good_steps: since the loss scale last changed.
        row: the step's row of metrics; None where it was not logged. A run that goes on from here writes it where
            metrics.jsonl lacks it. Left out of the file where there is none.
    """

    updates: StepCount
    skipped: StepCount
    overflows: StepCount
    next_sample: Count
    loss_scale: Annotated[float, Field(allow_inf_nan=False)] | None
    good_steps: Count
    row: dict[str, Number | dict[str, Number | None] | None] | None = None
    carried: StepCount = 0

    @property
    def moments_age(self) -> int:
        """Return the number of updates that the moments have seen."""
        return self.carried + self.updates
