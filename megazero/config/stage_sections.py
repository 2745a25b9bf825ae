"""The sections of a stage: what may be another in a part of a run (`config/changes.py`), each null for as it is.

Every field is an option of the config with its name and bounds, and null by itself.
"""

from typing import Annotated, Literal

from pydantic import Field

from megazero.config.sections import NonNegative, Positive, Section, Sequences, Sources, Tokens

Beta = Annotated[float, Field(ge=0, lt=1)]


class StageData(Section):
    sources: Sources | None = Field(default=None, description="Instead of the config's data.sources.")
    mask_eod: bool | None = Field(default=None, description="Attention, positions and loss stop at document ends.")


class StageModel(Section):
    seq_len: Tokens | None = Field(default=None, description="Sequence length in tokens; with rotary positions.")


class StageBatch(Section):
    global_: Sequences | None = Field(default=None, alias="global", description="Sequences in a step, over all ranks.")
    micro: Sequences | None = Field(default=None, description="Sequences in one forward pass of one data rank.")


class StageOptimizer(Section):
    lr: Annotated[float, Field(gt=0)] | None = Field(default=None, description="Peak learning rate of AdamW.")
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] | None = Field(
        default=None, description="Decay rates of the moments."
    )
    eps: Annotated[float, Field(ge=1e-20)] | None = Field(
        default=None, description="Added to the root of the second moment."
    )
    weight_decay: Annotated[float, Field(ge=0)] | None = Field(default=None, description="Decoupled decay.")
    clip: Annotated[float, Field(ge=0)] | None = Field(default=None, description="Largest global gradient norm.")


class StageSchedule(Section):
    warmup: NonNegative | None = Field(default=None, description="Updates of linear warm-up, of the run.")
    decay: Literal["cosine", "linear", "wsd", "constant"] | None = Field(default=None, description="After the warm-up.")
    min_lr: Annotated[float, Field(ge=0)] | None = Field(default=None, description="Learning rate at the run's end.")
    cooldown: NonNegative | None = Field(default=None, description="Last updates of the run in which wsd falls.")
    steps: Positive | None = Field(default=None, description="Updates of the run until min_lr.")


class Stage(Section):
    until_step: Positive | None = Field(default=None, description="The last step of the stage, from 1.")
    until_tokens: Annotated[int, Field(ge=1, lt=2**63)] | None = Field(
        default=None, description="Instead: the tokens of the run, all stages together, with which it ends."
    )
    data: StageData | None = Field(default=None, description="What is trained on.")
    model: StageModel | None = Field(default=None, description="How long sequences are.")
    batch: StageBatch | None = Field(default=None, description="How many sequences a step has.")
    optimizer: StageOptimizer | None = Field(default=None, description="How an update is made.")
    schedule: StageSchedule | None = Field(default=None, description="How fast.")
