"""Find the place of the first non-finite number in a non-finite step, on one rank."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megazero.data.batch import MicroBatch
from megazero.pipeline.executor import Pipeline
from megazero.pipeline.stage import StageInputs
from megazero.schedules.actions import Kind
from megazero.zero.engine import Engine

# (place in the data flow of a step: forwards by stage, then backwards from the loss; the non-finite value in words).
Fault = tuple[int, str]
AFTER_SUMS = 1 << 30  # the place of faults in sums over ranks: after all places on one rank


def own_fault(
    engine: Engine,
    pipeline: Pipeline,
    loss_scale: Tensor,
    batches: Sequence[MicroBatch],
    feed: Callable[[MicroBatch], StageInputs],
) -> Fault | None:
    """Repeat a step without reducing gradients; return this rank's first fault, None if all is finite. Collective.

    Args:
        loss_scale: of the step.
        batches: of the step.
        feed: micro-batch -> the inputs of the stages.
    """
    last, seen = pipeline.num_stages - 1, list[Fault]()

    def look(kind: Kind, stage: int, micro_batch: int, made: Tensor) -> None:
        if torch.isfinite(made).all():
            return
        what, place = f"gradient of the input of stage {stage}", 2 * last + 1 - stage
        if kind is Kind.FORWARD:
            what, place = "loss" if stage == last else f"output of stage {stage}", stage
        seen.append((place, f"{what} of micro-batch {micro_batch}"))

    found = engine.examine(lambda: pipeline.train(batches, feed, look=look), loss_scale)
    stages = list(pipeline.stages)
    parameters = [(2 * last + 1 - stages[number], what) for number, what in found]
    return min([*parameters, *seen], key=lambda fault: fault[0], default=None)
