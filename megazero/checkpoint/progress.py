"""Define the counters of a run that a checkpoint keeps next to the tensors."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0, lt=2**63)]
StepCount = Annotated[int, Field(ge=0, lt=2**31)]  # the bounds of run.steps
Number = Annotated[int, Field(ge=-(2**63), lt=2**63)] | Annotated[float, Field(allow_inf_nan=False)]


class StrictModel(BaseModel):
    """Base of values read from a checkpoint's files: unknown keys and type conversions are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Progress(StrictModel):
    """The counters of a run, which its tensors do not contain.

    Attributes:
        updates: steps of the run that were not skipped; the learning rate schedule counts these.
        carried: updates that the optimizer's moments had seen before the run loaded them (`checkpoint.load` optimizer);
            its bias correction counts `carried` + `updates`. Left out of the file if 0.
        skipped: skipped steps of the whole run.
        overflows: consecutive skipped steps up to this one.
        next_sample: id of the first sample not consumed.
        loss_scale: of the next step; None if no scaling is used.
        good_steps: steps since the loss scale last changed.
        row: the step's row of metrics; None if it was not logged, and then left out of the file. A run that resumes
            here writes the row if metrics.jsonl lacks it.
        norms: the gradient norms of the last steps; left out of the file if empty.
        spikes: steps of the whole run with unusual gradient norms (`run.on_spike`). Left out of the file if 0.
    """

    updates: StepCount
    skipped: StepCount
    overflows: StepCount
    next_sample: Count
    loss_scale: Annotated[float, Field(allow_inf_nan=False)] | None
    good_steps: Count
    row: dict[str, Number | dict[str, Number | None] | None] | None = None
    carried: StepCount = 0
    norms: list[Annotated[float, Field(allow_inf_nan=False)]] = Field(default_factory=list, max_length=1000)
    spikes: StepCount = 0

    @property
    def moments_age(self) -> int:
        """Return the number of updates that the optimizer's moments have seen."""
        return self.carried + self.updates
